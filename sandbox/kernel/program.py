"""The kernel's program, run by the sandbox's own Python: an ipykernel whose sockets are inherited. Sent there as text.

`python3 -B -c START TEXT SITE MINOR` with the listening sockets of the channels "shell" and "iopub" at descriptors 3
and 4, and the messages' key in ROLLMILL_KERNEL_KEY. No connection file, no ports, no heartbeat, no history, no profile:
what a kernel usually leaves in a home directory would end up in the checkpoint of the agent's work.

An ipykernel of the image is taken where there is one. Else that in SITE is, if this Python has the version MINOR for
which its compiled parts were built; for the user's own imports SITE comes last, so that it hides nothing of the image.
All of this runs among the agent's files: whatever it says is believed by nobody.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
import types
from typing import Any

SHELL_FD, IOPUB_FD, SITE_FD = 3, 4, 5
KEY = "ROLLMILL_KERNEL_KEY"
TEXT_CHARACTERS = 256 * 1024
"""Longer texts are cut here already, so that no honest message is larger than its reader takes."""
IMAGE_CHARACTERS = 2 * 1024 * 1024
"""Largest image in base64."""
START = "import sys; sys.path[:] = filter(None, sys.path); exec(sys.argv.pop(1))"
"""Runs TEXT without the directory that it stands in: no module of the agent's takes the place of the kernel's."""
LIBRARIES, LENT = ".libraries", ("libgcc_s.so.1", "libstdc++.so.6")
"""Shared libraries of this machine in SITE, in the order of their loading."""
CLIENT = "jupyter_client"
PIPE_LOOKS, PIPE_PAUSE_S = 20, 0.0005
"""How often a pipe is looked at that is not empty yet, and the pause before the next look."""
SHOWN = ("text/plain", "image/png", "image/jpeg")


def shorten(text: str) -> str:
    """The text, or its head and tail around a line that says how much is missing."""
    left_out = len(text) - TEXT_CHARACTERS
    if left_out <= 0:
        return text
    half = TEXT_CHARACTERS // 2
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"


def trim(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a message with its texts shortened, and of its media only what the tool shows."""
    content = {name: shorten(value) if isinstance(value, str) else value for name, value in content.items()}
    if isinstance(content.get("traceback"), list):
        content["traceback"] = [shorten("\n".join(map(str, content["traceback"])))]
    if isinstance(content.get("data"), dict):
        shown = {name: value for name, value in content["data"].items() if name in SHOWN and isinstance(value, str)}
        for name in SHOWN[1:]:
            if len(shown.get(name, "")) > IMAGE_CHARACTERS:
                size = len(shown.pop(name))
                note = f"[an image of {size} base64 characters is left out: at most {IMAGE_CHARACTERS} are shown]"
                shown["text/plain"] = shown.get("text/plain", "") + note
        shown["text/plain"] = shorten(shown.get("text/plain", ""))
        content["data"], content["metadata"] = shown, {}
    content.pop("payload", None)
    return content


def find_kernel(site: str, minor: str) -> Any:
    """The module ipykernel.kernelapp, of the image or of SITE.

    Raises:
        SystemExit: there is none for this Python; the text says what to put in the image.
    """
    have = f"{sys.version_info.major}.{sys.version_info.minor}"
    own = f"this image's Python is {have} ({sys.executable}) and has no ipykernel"
    mend = "install ipykernel in the image (python3 -m pip install ipykernel)"
    try:
        found = importlib.util.find_spec("ipykernel") is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        if site == "-" or minor != have:
            raise SystemExit(f"{own}, and ours is for Python {minor}: {mend}")
        sys.path.insert(0, site)
        lend_libraries(site)
    try:
        thin_client()
        return importlib.import_module("ipykernel.kernelapp")
    except ImportError as error:
        raise SystemExit(f"{own}, and ours cannot be loaded there ({error}): {mend}" if not found else
                         f"the image's ipykernel cannot be loaded ({error}): {mend}") from None  # fmt: skip


def thin_client() -> None:
    """Let ipykernel have jupyter_client's modules without what it imports for clients, a sixth of all imports.

    The rest of the package comes when anybody first asks it for something else.
    """
    found = importlib.util.find_spec(CLIENT)
    if found is None or found.loader is None or CLIENT in sys.modules:
        return
    loader = found.loader
    asked: list[str] = []

    class Thin(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if asked or (name.startswith("__") and name != "__version__"):
                raise AttributeError(f"module {CLIENT!r} has no attribute {name!r}")
            for part in ("_version", "connect"):
                with contextlib.suppress(AttributeError):
                    return getattr(importlib.import_module(f"{CLIENT}.{part}"), name)
            asked.append(name)
            loader.exec_module(self)
            return getattr(self, name)

    thin = importlib.util.module_from_spec(found)
    thin.__class__ = Thin
    sys.modules[CLIENT] = thin


def hasten(app: Any) -> None:
    """Leave out waits at the end of a cell: for output that is not there, and the half millisecond for other clients.

    What children wrote comes through a pipe and a thread; for that is waited where there is any. Of an ipykernel that
    has its streams otherwise nothing is changed.
    """
    fcntl, termios = importlib.import_module("fcntl"), importlib.import_module("termios")
    out, err = sys.stdout, sys.stderr
    if not all(hasattr(one, name) for one in (out, err) for name in ("_flush_pending", "_buffers", "_fid")):
        return
    flush_out, flush_err = out.flush, err.flush

    def unread(stream: Any) -> bool:
        return stream._fid is not None and fcntl.ioctl(stream._fid, termios.FIONREAD, b"\0" * 4) != b"\0" * 4

    def collect(stream: Any) -> bool:
        for _ in range(PIPE_LOOKS):
            if not unread(stream):
                break
            time.sleep(PIPE_PAUSE_S)
        return bool(stream._flush_pending or stream._buffers)

    def flush_what_is_there() -> None:
        if collect(out):
            flush_out()

    def flush_both() -> None:
        collect(err)
        flush_err()  # waits for another thread, so that one which has just read of a pipe comes to its turn
        flush_what_is_there()

    out.flush, err.flush = flush_what_is_there, flush_both  # type: ignore[method-assign]
    app.kernel._execute_sleep = 0.0


def lend_libraries(site: str) -> None:
    """Load the C++ runtime that pyzmq needs out of SITE, where the image has none."""
    try:
        ctypes = importlib.import_module("ctypes")
        try:
            ctypes.CDLL(LENT[-1])
        except OSError:
            for name in LENT:
                ctypes.CDLL(f"{site}/{LIBRARIES}/{name}", mode=ctypes.RTLD_GLOBAL)
    except (ImportError, OSError):
        return  # the import that needs it says so


def make_application(kernelapp: Any, key: bytes) -> Any:
    """An IPKernelApp on the inherited sockets."""
    zmq = importlib.import_module("zmq")
    session_class = importlib.import_module("jupyter_client.session").Session

    class TrimmingSession(session_class):  # type: ignore[misc, valid-type]
        def send(self, stream: Any, msg_or_type: Any, content: Any = None, *rest: Any, **named: Any) -> Any:
            if isinstance(msg_or_type, dict):
                msg_or_type = {**msg_or_type, "content": trim(msg_or_type.get("content") or {})}
            elif isinstance(content, dict):
                content = trim(content)
            return super().send(stream, msg_or_type, content, *rest, **named)

    class Application(kernelapp.IPKernelApp):  # type: ignore[misc]
        def _bind_socket(self, s: Any, port: int) -> int:
            if s.socket_type in (zmq.PUB, zmq.XPUB):
                s.setsockopt(zmq.SNDHWM, 0)  # the reader is in no hurry: what is not read yet waits here
                take(s, IOPUB_FD)
            return port

        def init_sockets(self) -> None:
            super().init_sockets()
            take(self.shell_socket, SHELL_FD)  # not before: a debugger's client would connect to it

        def log_connection_info(self) -> None:
            self._ports: dict[str, int] = {}

        def init_crash_handler(self) -> None: ...
        def init_connection_file(self) -> None: ...
        def write_connection_file(self, **_: Any) -> None: ...
        def cleanup_connection_file(self) -> None: ...
        def init_heartbeat(self) -> None: ...

    def take(socket: Any, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        socket.setsockopt(zmq.USE_FD, descriptor)
        socket.bind(f"ipc://rollmill-{descriptor}")

    return Application(session=TrimmingSession(key=key), transport="ipc")


def main() -> None:
    """Run until killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    site, minor = sys.argv[1:3]
    key = os.environ.pop(KEY).encode()
    if site != "-" and site.endswith(f"/{SITE_FD}"):
        os.set_inheritable(SITE_FD, False)
    users_path = ["", *sys.path]
    here = os.path.realpath(".")
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]
    temporary = os.environ.get("TMPDIR", "/tmp")  # noqa: S108
    if os.access(temporary, os.W_OK):
        tempfile.tempdir = temporary  # else tempfile tries it out, which leaves its mark on the directory
    home = tempfile.mkdtemp(prefix="kernel-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)  # noqa: S108
    os.environ["IPYTHONDIR"] = home
    app = make_application(find_kernel(site, minor), key)
    app.config.ProfileDir.location = home
    app.config.HistoryManager.enabled = False
    app.config.InteractiveShell.colors = "NoColor"
    app.config.InteractiveShellApp.exec_PYTHONSTARTUP = False
    sys.argv[:] = [""]
    app.initialize([])
    with contextlib.suppress(ImportError, AttributeError):
        hasten(app)
    shutil.rmtree(home, ignore_errors=True)
    os.environ.pop("IPYTHONDIR", None)
    sys.path[:] = [*users_path, *([site] if site in sys.path else [])]
    sys.dont_write_bytecode = False
    app.start()


if __name__ == "__main__":
    main()
