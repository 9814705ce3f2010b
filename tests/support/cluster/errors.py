"""The error of the test cluster: what stops it from coming up or from doing what a test asked."""


class ClusterError(Exception):
    """One line: what, where, what to do."""
