"""Progress where standard error is not a terminal: lines from time to time, none where they are turned off."""

import pytest

from fxquant.support import progress as shown


@pytest.mark.parametrize("total", [3, None])
def test_lines_say_how_far_it_is(total: int | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "BETWEEN_LINES", 0.0)
    assert list(shown.progress("abc", total, "calibrating")) == ["a", "b", "c"]
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == f"calibrating: 1{' of 3' if total else ''} after 0 s"
    assert last.startswith("calibrating: 3")
    list(shown.progress("abc", total, "calibrating", show=False))
    monkeypatch.setattr(shown, "BETWEEN_LINES", 10.0)
    list(shown.progress("abc", total, "calibrating"))
    assert not capsys.readouterr().err
