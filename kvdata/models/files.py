"""Files of trained modules: tensors and plain values, so that reading one runs no code of whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from kvdata.edits.rope import Rope
from kvdata.errors import InvalidRequest

CHECKPOINT_KEY = "kvdata_module"
"""Where a recipe's checkpoint carries the same content as a module's own file."""


Saved = TypeVar("Saved", bound="SavedModule")


class SavedModule(nn.Module):
    """A module whose geometry and weights are one file, or ride in a recipe's checkpoint.

    A subclass names its `kind` and `version`, and lists in `geometry` the arguments that make an empty one: with
    ``interleaved`` in place of ``rope``, whose frequencies are its buffer ``inv_freq``.
    """

    kind: ClassVar[str]
    version: ClassVar[int]

    def geometry(self) -> dict[str, Any]:
        """Arguments of the constructor, as plain values."""
        raise NotImplementedError

    def exported(self) -> dict[str, Any]:
        """What a file holds: tensors and plain values only."""
        return {"kind": self.kind, "version": self.version, "config": self.geometry(), "state": self.state_dict()}

    def save(self, path: str | Path) -> None:
        """Write geometry and weights to one file that `load` reads."""
        torch.save(self.exported(), path)

    @classmethod
    def load(cls: type[Saved], path: str | Path) -> Saved:
        """A module from `save` or from a recipe's checkpoint, on the CPU in eval mode.

        Raises:
            InvalidRequest: the file is of another kind or version.
        """
        data = _content(path, cls.kind, cls.version)
        config, state = dict(data["config"]), data["state"]
        if "interleaved" in config:
            config["rope"] = Rope(state["inv_freq"], config["head_dim"], config.pop("interleaved"))
        module = cls(**config)
        module.load_state_dict(state)
        return module.eval()


def _content(path: str | Path, kind: str, version: int) -> dict[str, Any]:
    """The content of a module's file, or of a Lightning checkpoint that carries it; tensors on the CPU."""
    try:
        data: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as exc:  # a damaged or hostile file can raise anything
        # Not with PyTorch's message, which advises to run what is in the file.
        raise InvalidRequest(f"{path} is no file of a trained module ({type(exc).__name__})") from exc
    if isinstance(data, Mapping):
        data = data.get(CHECKPOINT_KEY, data)
    found = (data.get("kind"), data.get("version")) if isinstance(data, Mapping) else (None, None)
    if found != (kind, version):
        raise InvalidRequest(f"{path} is not a {kind} of version {version}; train and save it again")
    return dict(data)
