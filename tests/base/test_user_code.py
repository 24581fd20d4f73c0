"""Tests of the warnings that name the user's line."""

from __future__ import annotations

import warnings

import pytest

from globaltensor._base.user_code import warn_user


def warn(text: str) -> None:
    warn_user(text)
    with warnings.catch_warnings():  # Python forgets here which warnings it has shown
        pass


@pytest.mark.parametrize(("action", "expected"), [("default", 1), ("always", 3), ("ignore", 0)])
def test_a_warning_is_shown_as_often_as_the_filters_say(action: str, expected: int) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        warnings.simplefilter(action)  # type: ignore[arg-type]
        for _ in range(3):
            warn(f"a text for {action}")
        assert len(shown) == expected
        assert all(w.filename == __file__ for w in shown)


def test_filters_of_a_text_and_an_error_hold() -> None:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filterwarnings("error", message="a text that .*")
        with pytest.raises(UserWarning, match="a text that raises"):
            warn("a text that raises")
