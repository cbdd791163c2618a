"""Kinds of tasks by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_ddrp.config import registry
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.tasks.finetune.kinds.contract import Kind


class _Kinds(Mapping[str, Kind]):
    """Kinds by name: those of `registry.KINDS`, with those of plug-ins."""

    def __getitem__(self, name: str) -> Kind:
        kind: Kind = registry.KINDS.find(name)()
        if kind.name != name:
            raise UserError(f"KINDS[{name!r}] has the name {kind.name!r}: give it its name", WRONG_ARGUMENTS)
        return kind

    def __contains__(self, name: object) -> bool:
        return name in registry.KINDS

    def __iter__(self) -> Iterator[str]:
        return iter(registry.KINDS)

    def __len__(self) -> int:
        return len(registry.KINDS)


KINDS = _Kinds()
