"""workflow=train: the reference trainer, which learns by the interfaces that any trainer uses."""
