"""Tests of ``visualize_sharding`` and ``sharding_svg``: what is printed, by which rank, and in
which colours."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
from support.pool import run_on

import globaltensor as flow
from globaltensor._tensor.display import drawing
from globaltensor.boxing import explain_boxing
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.sbp import Sbp, broadcast, partial_sum, split
from globaltensor.sharding.placement import Placement
from globaltensor.sharding.spec import Spec

LINE, GRID = Placement("cpu", [0, 1]), Placement("cpu", [[0, 1], [2, 3]])
PLAIN = """\
f32[5, 7] S(0) S(1)  on cpu [[0, 1], [2, 3]]
  rank 0  [0, 0]  [3, 4]  x[0:3, 0:4]
  rank 1  [0, 1]  [3, 3]  x[0:3, 4:7]
  rank 2  [1, 0]  [2, 4]  x[3:5, 0:4]
  rank 3  [1, 1]  [2, 3]  x[3:5, 4:7]

          7
   +------+------+
   |0     |1     |
   |      |      |
 5 +------+------+
   |2     |3     |
   |      |      |
   +------+------+
"""
ANSI = re.compile(r"\x1b\[[\d;]*m")


def make(shape: tuple[int, ...], placement: Placement, *layout: Sbp) -> Spec:
    return Spec.make(shape, torch.float32, placement, layout)


SPEC = make((5, 7), GRID, split(0), split(1))


class Terminal(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class Writer:
    """A file with no more than ``write``."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def shown(file: io.StringIO) -> str:
    flow.visualize_sharding(SPEC, file=file)
    return file.getvalue()


def test_text_for_a_file_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(io.StringIO()) == PLAIN
    flow.show(SPEC)
    assert capsys.readouterr().out == PLAIN
    writer = Writer()
    flow.show(SPEC, file=writer)  # type: ignore[arg-type]
    assert writer.text == PLAIN


def test_a_terminal_has_a_colour_for_each_rank() -> None:
    text = shown(Terminal())
    assert ANSI.sub("", text) == PLAIN
    lines = text.splitlines()
    colours = [re.match(r"  \x1b\[38;5;16;48;5;(\d+)mrank \d\x1b\[0m  ", line) for line in lines]
    codes = [match[1] for match in colours if match]
    assert len(set(codes)) == 4
    # A cell is filled with the colour of its rank, in both of its lines.
    for line, label in ((8, "0"), (9, " ")):
        assert f"|\x1b[38;5;16;48;5;{codes[0]}m{label}     \x1b[0m|" in lines[line]


def test_each_of_several_ranks_in_a_cell_has_its_own_colour() -> None:
    text = drawing(make((4, 6), GRID, split(0), broadcast), colour=True)
    (cell,) = re.findall(r"\|(.*),(.*?) *\|", text.splitlines()[8])
    assert [ANSI.sub("", part) for part in cell] == ["0", "1"]
    assert len({part[: part.index("m")] for part in cell}) == 2


@pytest.mark.parametrize(
    ("variables", "terminal", "coloured"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),  # no-color.org: "not an empty string"
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": ""}, False, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
    ],
)
def test_variables_decide_on_colour(
    variables: dict[str, str], terminal: bool, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    text = shown(Terminal() if terminal else io.StringIO())
    assert bool(ANSI.search(text)) == coloured
    assert ANSI.sub("", text) == PLAIN


def test_a_picture_of_partials_and_many_ranks_keeps_its_text() -> None:
    assert drawing(make((4,), LINE, partial_sum)) == (
        "f32[4] P  on cpu [0, 1]\n"
        "  rank 0  [0]  [4]  x[:], a summand (P)\n"
        "  rank 1  [1]  [4]  x[:], a summand (P)"
    )
    many = drawing(make((66,), Placement("cpu", range(66)), split(0)))
    assert many.splitlines()[-1] == "  and 2 more ranks"


def print_without_file() -> tuple[str, str, int]:
    """Return what this rank prints to standard output, and to a file; and its collectives."""
    x = flow.ones(4, 6, placement=LINE, sbp=split(0))
    out, file = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), record_collectives() as log:
        flow.visualize_sharding(x)
        if x.placement.coordinate(flow.env.get_rank()) == (1,):
            flow.visualize_sharding(x)  # one rank alone: no other one waits
            flow.visualize_sharding(x, file=file)
            flow.sharding_svg(x)
            x._repr_html_()
    return out.getvalue(), file.getvalue(), len(log)


def test_only_the_first_rank_of_real_processes_prints_and_nothing_is_sent() -> None:
    text = drawing(make((4, 6), LINE, split(0))) + "\n"
    assert run_on(2, print_without_file) == [(text, "", 0), ("", text, 0)]


def test_only_the_first_simulated_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(2, lambda: flow.visualize_sharding(make((4, 6), LINE, split(0))))
    assert capsys.readouterr().out == drawing(make((4, 6), LINE, split(0))) + "\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_spec_is_printed_before_the_world_starts(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other rank does not exist, so starting the world would hang."""
    monkeypatch.setattr("globaltensor._tensor.display.running", lambda: None)
    # another test of this process may have left a group
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    for name, value in {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    flow.visualize_sharding(SPEC)
    assert capsys.readouterr().out == (PLAIN if rank == 0 else "")


def test_svg_of_a_tensor_a_placement_and_a_route() -> None:
    x = flow.ones(4, 6, placement=flow.placement("cpu", [0]), sbp=split(0))
    assert flow.sharding_svg(x) == flow.sharding_svg(x.spec)
    assert flow.sharding_svg(x).startswith("<svg xmlns=")
    assert ">placement on cpu, 1 rank<" in flow.sharding_svg(x.placement)
    route = explain_boxing(make((4, 4), LINE, split(0)), make((4, 4), LINE, broadcast))
    assert flow.sharding_svg(route) == route.svg()
    assert "all_gather on axis 0" in flow.sharding_svg(route)


def test_a_tensor_is_shown_in_a_notebook_without_its_values() -> None:
    x = flow.full((4, 6), 12345.0, placement=flow.placement("cpu", [0]), sbp=split(0))
    assert flow.sharding_svg(x) in x._repr_html_()
    assert "12345" not in x._repr_html_()
    layer = torch.nn.Linear(3, 2).to_global(flow.placement("cpu", [0]), broadcast)
    assert "f32[2, 3] B" in layer.weight._repr_html_()


def test_a_module_is_shown_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    def show() -> None:
        with torch.device("meta"):
            model = torch.nn.Sequential(
                torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3), torch.nn.LazyLinear(2)
            )
        flow.parallelize(model[0], flow.placement("meta", [0, 1]), "fsdp")
        flow.visualize_sharding(model)

    simulate(2, show)
    assert (
        capsys.readouterr().out
        == """\
Sequential: 9 parameters and buffers, 7 of them plain, on meta [0, 1]; the last column has the \
shape that a rank holds
  0.weight               f32[3, 6]     S(1)   [3, 3]
  0.bias                 f32[3]        S(0)   [2] at most
  1.weight               f32[3]        plain
  1.bias                 f32[3]        plain
  2.weight               no shape yet  plain
  2.bias                 no shape yet  plain
  1.running_mean         f32[3]        plain
  1.running_var          f32[3]        plain
  1.num_batches_tracked  i64[]         plain
"""
    )


@pytest.mark.parametrize("draw", [flow.visualize_sharding, flow.sharding_svg])
def test_a_plain_tensor_is_refused(draw: object) -> None:
    with pytest.raises(TypeError, match=r"draws a global tensor .* not Tensor: .*flow\.tensor"):
        draw(torch.ones(2))  # type: ignore[operator]


def test_the_pictures_of_the_page_are_those_that_its_program_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To renew them, run the page's program in docs/images."""
    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.chdir(tmp_path)
    program = re.findall(r"^```python\n(.*?)^```", (docs / "visualize.md").read_text(), re.M | re.S)
    exec("\n".join(program), {"__name__": "__main__"})
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    named = re.findall(r"\(images/(.*?)\)", (docs / "visualize.md").read_text())
    assert sorted(drawn) == sorted(named)
    for name, svg in drawn.items():
        assert (docs / "images" / name).read_text() == svg, name
