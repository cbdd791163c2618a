"""Output folder of a conversion: what it may not replace."""

from pathlib import Path

import pytest

from megatron_ddrp.conversion.families.contract import refuse_output
from megatron_ddrp.errors import UserError


@pytest.mark.parametrize("name", [".", "../here", ".."])
def test_folders_around_the_current_one_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="is or holds the current folder") as refused:
        refuse_output(Path(name), overwrite=True, replaceable=lambda _: True, kind="an export")
    assert refused.value.exit_code == 2
