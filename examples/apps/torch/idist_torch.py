"""idist_torch.py - the backend `idist` of torch.distributed

Import this module, and name the backend:

    import idist_torch
    torch.distributed.init_process_group("idist")

The first import on a host compiles the extension in this folder, with torch's cpp_extension. It
takes a minute or two, and needs a C++ compiler and ninja. Other processes wait meanwhile. The
result is kept in TORCH_EXTENSIONS_DIR, or else ~/.cache/torch_extensions, until the sources or
torch change.

The sources include idist.h and idist_ring.h. They may be in this folder, or in the root of a clone
of idist whose folder examples/apps/torch this is.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pathlib
import sys

import torch
import torch.distributed as dist

NAME = "idist_c10d"
FOLDER = pathlib.Path(__file__).resolve().parent
SOURCES = ["backend.cpp", "implementation.cpp"]
HEADERS = ["errors.hpp", "message.hpp", "queue.hpp", "tensors.hpp", "world.hpp"]


def _headers_of_idist():
    """Returns the folder that contains idist.h."""
    for folder in [FOLDER, *FOLDER.parents[2:3]]:
        if (folder / "idist.h").exists():
            return folder
    raise ImportError(f"idist_torch: there is no idist.h in {FOLDER}")


def _build_folder(include):
    """Returns a folder whose name depends on everything that the extension is made of."""
    files = [FOLDER / name for name in SOURCES + HEADERS]
    files += [include / "idist.h", include / "idist_ring.h"]
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for file in files:
        digest.update(file.read_bytes())
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions")
    folder = pathlib.Path(root) / f"{NAME}-{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _locked(folder):
    """Lets one process at a time into the folder. The lock ends with the process that holds it."""
    with open(folder / "idist.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(folder, include):
    """Compiles the extension in the folder."""
    from torch.utils import cpp_extension

    # torch's own lock stays behind if a process is killed while it compiles.
    (folder / "lock").unlink(missing_ok=True)
    cpp_extension.load(
        NAME,
        [str(FOLDER / name) for name in SOURCES],
        extra_include_paths=[str(include)],
        extra_cflags=["-O2"],
        build_directory=str(folder),
    )
    (folder / "complete").touch()


def _load():
    """Returns the extension, which it compiles first if necessary."""
    include = _headers_of_idist()
    folder = _build_folder(include)
    with _locked(folder):
        if not (folder / "complete").exists():
            _compile(folder, include)
    spec = importlib.util.spec_from_file_location(NAME, folder / f"{NAME}.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _default_backend():
    """Returns the CPU backend of the default process group, or None."""
    if not dist.is_initialized():
        return None
    try:
        return dist.group.WORLD._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None


def _create(options, _backend_options):
    """Makes the backend of a process group: of the default group, or of some of its ranks."""
    ranks = options.global_ranks_in_group
    parent = _default_backend() if ranks else None
    if parent is not None:
        group = _extension.open_group(parent, ranks, options.group_id, options.timeout)
        if group is not None:
            return group
    return open_world(options.store, options.group_rank, options.group_size, options.timeout)


def open_world(store, rank, size, timeout):
    """Makes a backend by itself, without a process group. The ranks meet at the store."""
    return _extension.open(store, rank, size, timeout)


_extension = _load()
dist.Backend.register_backend("idist", _create, extended_api=True, devices=["cpu"])
