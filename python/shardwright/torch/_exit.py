"""A clean end of programs on gloo.

A thread of gloo drops a collective's tensors after the program has waited for the result. If Python ends in between, the
process aborts (seen with PyTorch 2.11 and any DeviceMesh). `destroy_process_group` joins the threads, but only of groups
to which no reference is left: a mesh keeps references for as long as it lives.
"""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch import distributed


def release_at_exit(mesh: Any, release: weakref.WeakMethod[Callable[[], None]] | None = None) -> None:
    """At the end of the program, drops the mesh's references to process groups, and others by `release`, and destroys the
    groups where the program has not done so. Groups of other backends are left alone."""
    if distributed.get_backend() == "gloo":
        atexit.register(_release, mesh, release)


def _release(mesh: Any, release: weakref.WeakMethod[Callable[[], None]] | None) -> None:
    if release is not None and (method := release()) is not None:
        method()
        gc.collect()
    getattr(mesh._get_root_mesh(), "_pg_registry", {}).clear()
    if distributed.is_initialized():
        distributed.destroy_process_group()
