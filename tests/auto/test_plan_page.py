"""Tests of a plan's page. The page is self-contained and its scripts are complete. If a browser is
available, the page runs there without errors."""

from __future__ import annotations

import copy
import dataclasses
import html
import html.parser
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from support.plans import layered, pipelined
from torch import nn

import globaltensor
import globaltensor as flow
from globaltensor.auto.inter_op.step_simulator import StageTimes, step
from globaltensor.auto.plan.cost_text import cost_cards
from globaltensor.auto.plan.devices import drawing_key, held_slices
from globaltensor.auto.plan.html import data, page
from globaltensor.auto.plan.plan import Lost, PlacedTensor, Plan
from globaltensor.cluster import Cluster
from globaltensor.graph.pipeline.schedule import schedule
from globaltensor.graph.pipeline.simulate import simulate
from globaltensor.graph.pipeline.timeline import trace
from globaltensor.sharding.holdings_table import rank_rows
from globaltensor.sharding.sbp import Sbp, broadcast, partial_max, partial_sum, split
from globaltensor.sharding.spec import Spec

FOLDER = Path(globaltensor.__file__).parent / "auto" / "plan" / "page"
SCRIPTS = sorted(FOLDER.glob("*.js"))
NODE = shutil.which("node")
CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
        if (found := shutil.which(name))
    ),
    None,
)
needs_node = pytest.mark.skipif(
    NODE is None, reason="node is not installed: scripts are not parsed"
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium or Chrome is installed: the page is not opened"
)


class Elements(html.parser.HTMLParser):
    """A parser that collects a page's elements: (tag, attributes) of each element, and the text of
    each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script" and self.scripts:
            self.scripts[-1] += data


def ids(text: str) -> set[str]:
    return {i for _, about in Elements(text).elements if (i := about.get("id"))}


# --------------------------------------------------------------------------------------------- text


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page(layered(3))
    for tag, about in Elements(text).elements:
        assert not {"src", "srcset", "data", "action"} & set(about), (tag, about)
        assert not (about.get("href") or "#").startswith(("http", "//")), (tag, about)
    assert set(re.findall(r"https?://[^\"' )\\]+", text)) <= {
        "http://www.w3.org/2000/svg"
    }  # a name, not fetched
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    assert "default-src 'none'" in text


def test_the_page_holds_the_plan() -> None:
    plan = layered(3)
    told = json.loads(Elements(page(plan)).scripts[0])
    assert told == json.loads(json.dumps(data(plan)))
    assert [c["name"] for c in told["plan"]["calls"]] == [c.name for c in plan.calls]
    assert told["plan"]["alternatives"][-1] | {"name": ""} == {
        "name": "",
        "cost": None,
        "memory": 0,
        "fits": False,
        "why": plan.alternatives["pipeline"].why,
    }
    assert told["texts"]["title"] == plan.report().splitlines()[0]
    assert dict(told["texts"]["rest"])["schedule"] == "1f1b"


def test_names_are_data_and_never_markup() -> None:
    plan = layered(1, prefix="</script><script>document.title='broken'</script><!--")
    found = Elements(page(plan))
    assert len(found.scripts) == len(Elements(page(layered(1))).scripts)
    assert json.loads(found.scripts[0])["plan"]["calls"][0]["module"] == plan.calls[0].module


def test_the_timeline_is_a_trace() -> None:
    plan = layered(2)
    spans = [e for e in data(plan)["trace"]["traceEvents"] if e["ph"] == "X"]
    assert sum(e["dur"] for e in spans) * 1e-6 == pytest.approx(
        plan.cost + plan.cost_breakdown["hidden"]
    )
    ends = [0.0, *(e["ts"] + e["dur"] for e in spans)]
    assert all(e["ts"] == pytest.approx(end) for e, end in zip(spans, ends, strict=False)), (
        "one after the other"
    )
    pipelined = trace(pipeline=simulate(schedule("1f1b", (0, 1), micros=3), {"F": 1.0, "B": 2.0}))
    assert data(plan, pipelined)["trace"] == pipelined


def test_a_page_is_written_to_a_file(tmp_path: Path) -> None:
    plan = layered(1)
    plan.save_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == page(plan)


def test_scripts_ask_only_for_what_the_page_has() -> None:
    there = ids((FOLDER / "page.html").read_text())
    for script in SCRIPTS:
        asked = set(re.findall(r"(?:getElementById|\bat)\(\"([\w-]+)\"\)", script.read_text()))
        assert asked <= there, f"{script.name} asks for {asked - there}"


def test_all_scripts_are_in_the_page_and_packaged() -> None:
    text = page(layered(1))
    for script in SCRIPTS:
        assert script.read_text() in text, f"{script.name} is in the folder but not in the page"
    git = shutil.which("git")
    if (
        git is not None and (FOLDER.parents[2] / ".git").exists()
    ):  # the build omits files that git ignores
        done = subprocess.run(
            [git, "check-ignore", *map(str, FOLDER.iterdir())],
            cwd=FOLDER,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert not done.stdout, done.stdout


# ------------------------------------------------------------------------------------------ scripts


@needs_node
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
@pytest.mark.sweep(4)
def test_scripts_parse(script: Path) -> None:
    done = subprocess.run(
        [NODE, "--check", str(script)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


ROWS = """
const plan = JSON.parse(require("fs").readFileSync(0, "utf8")).plan;
const index = indexed(plan), root = treeOf(plan, index), all = new Set();
const every = (node) => (node.children || []).forEach((c) => { all.add(c); every(c); });
every(root);
const text = ({ node, depth }) => "  ".repeat(depth) + (node.kind === "fold" ? `${node.label} (${node.alike})` : node.label);
const [closed, open] = [new Set(), all].map((set) => rowsOf(root, set, ""));
const wires = wiresOf(plan, rowsOf(root, all, ""));
console.log(JSON.stringify({
  closed: closed.map(text), open: open.map(text), found: rowsOf(root, new Set(), "linear_3").map(text), compute: root.compute, move: root.move,
  lanes: wires.lanes, wrong: wires.wires.filter((w) => w.from >= w.to || w.lane < 0).length, calls: root.calls.length,
  figures: [seconds(0.0012345), seconds(3.2e-7), seconds(75), seconds(null), bytes(512), bytes(1 << 24), percent(0.104)],
}));
"""  # noqa: E501


def evaluated(plan: Plan) -> dict[str, Any]:
    """Evaluate a plan with the scripts that need no page."""
    return run_scripts(("figures", "model"), ROWS, data(plan))  # type: ignore[no-any-return]


def run_scripts(names: tuple[str, ...], program: str, given: object) -> Any:
    """Run a program after some of the page's scripts. It reads JSON, and writes JSON."""
    assert NODE is not None
    source = "".join((FOLDER / f"{name}.js").read_text() for name in names) + program
    done = subprocess.run(
        [NODE, "-e", source], input=json.dumps(given), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_layers_that_are_alike_are_folded() -> None:
    plan = layered(5)
    told = evaluated(plan)
    assert told["closed"] == ["blocks", "mse_loss"]
    first = [
        "norm layer_norm",
        "up.weight all_reduce",
        "up linear",
        "down linear",
        "linear_1 all_reduce",
        "add",
    ]
    assert told["open"][:9] == ["blocks", "  0", *(f"    {name}" for name in first), "  1 … 4 (4)"]
    assert len(told["open"]) == 3 + 5 * (1 + len(first))
    assert told["found"] == [
        "blocks",
        "  1 … 4 (4)",
        "    1",
        "      down linear",
        "      linear_3 all_reduce",
    ]
    assert told["calls"] == len(plan.calls)
    assert told["compute"] == pytest.approx(plan.cost_breakdown["computing"])
    assert told["move"] == pytest.approx(plan.cost_breakdown["moving"])
    assert told["wrong"] == 0
    assert told["lanes"] == 1  # the residual of a layer; all other edges go from row to row


@needs_node
def test_layers_that_differ_are_not_folded() -> None:
    plan = layered(3)
    other = [
        dataclasses.replace(c, results=(("B", "B"),)) if c.name == "linear_2" else c
        for c in plan.calls
    ]
    assert not any(
        "…" in row for row in evaluated(dataclasses.replace(plan, calls=tuple(other)))["open"]
    )


@needs_node
def test_figures_are_those_of_the_report() -> None:
    from globaltensor.auto.plan.formatting import part, seconds
    from globaltensor.boxing.moves import show_bytes

    told = evaluated(layered(1))["figures"]
    assert told == [
        seconds(0.0012345),
        seconds(3.2e-7),
        seconds(75),
        seconds(float("inf")),
        show_bytes(512),
        show_bytes(1 << 24),
        part(0.104),
    ]


EXPLAIN = """
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map(([entries, axis, shape, mesh]) => explained(entries, axis, shape, mesh))));
"""  # noqa: E501


def explanations(cases: list[tuple[Any, ...]]) -> list[str]:
    return run_scripts(("figures", "hints"), EXPLAIN, cases)  # type: ignore[no-any-return]


@needs_node
def test_marks_are_explained_in_a_sentence() -> None:
    assert explanations(
        [
            (["S(0)"], 0, [512, 64], [4]),
            (["B", "S(1)"], 1, [512, 7], [2, 4]),
            (["B", "S(1)"], 0, [512, 7], [2, 4]),
            (["P"], 0, [4], [1]),
            (["P(max)"], 0, [4], [2]),
            (["S(0)", "S(0)"], 1, [16], [2, 4]),
            (["S(2)"], 0, None, [2]),
        ]
    ) == [
        "S(0): split on dim 0 over mesh axis 0 (4 devices): each holds 128 of 512 rows.",
        "S(1): split on dim 1 over mesh axis 1 (4 devices): each holds 1 or 2 of 7 columns.",
        "B: replicated over mesh axis 0 (2 devices): each holds the same data.",
        (
            "P: partial sum over mesh axis 0 (1 device): each holds a summand; the tensor is "
            "their sum."
        ),
        (
            "P(max): partial max over mesh axis 0 (2 devices): each holds a partial max; the "
            "tensor is the max of all."
        ),
        (
            "S(0): split on dim 0 over mesh axis 1 (4 devices), and over axis 0: each holds 2 of "
            "16 elements."
        ),
        "S(2): split on dim 2 over mesh axis 0 (2 devices).",
    ]


@needs_node
def test_explained_sizes_are_those_of_the_spec() -> None:
    """The sizes in the sentences are the local sizes of specs: uneven, nested and with units."""
    cases, expected = [], []
    for size, mesh, unit in itertools.product(range(1, 20), ((3,), (2, 3), (3, 2)), (1, 4)):
        placement = flow.placement("cpu", np.arange(math.prod(mesh)).reshape(mesh).tolist())
        spec = Spec.make((size,), torch.float32, placement, [Sbp("split", 0, unit)] * len(mesh))
        sizes = sorted({spec.local_shape(rank)[0] for rank in placement.flat})
        cases.append(([e.short for e in spec.layout], 0, [size], list(mesh)))
        expected.append(
            f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 2 else " or ".join(map(str, sizes))
        )
    for case, sentence, sizes_text in zip(cases, explanations(cases), expected, strict=True):
        assert f"each holds {sizes_text} of {case[2][0]} elements." in sentence, case


# ------------------------------------------------------------------------------------------ devices

GRID = (2, 4)
UNEVEN = (
    ("weight", (5, 7), (split(0), split(1))),
    ("tall", (11, 3), (split(0), split(0))),
    ("copies", (6, 4), (broadcast, broadcast)),
    ("sums", (6, 5), (partial_sum, split(1))),
    ("both", (9, 2), (partial_max, partial_sum)),
    ("line", (3,), (split(0), broadcast)),
    ("cube", (5, 3, 9), (split(0), split(2))),
    ("scalar", (), (partial_sum, broadcast)),
    ("nothing", (0, 4), (broadcast, split(1))),
)


def uneven() -> Plan:
    """Return a plan with parameters of uneven shapes in many layouts."""
    return dataclasses.replace(
        layered(1),
        placed=tuple(
            PlacedTensor(
                name, "parameter", shape, "bfloat16", tuple(e.short for e in layout), 8 * i
            )
            for i, (name, shape, layout) in enumerate(UNEVEN)
        ),
    )


def uneven_spec(name: str) -> Spec:
    shape, layout = next((s, entries) for n, s, entries in UNEVEN if n == name)
    placement = flow.placement("cuda", np.arange(math.prod(GRID)).reshape(GRID).tolist())
    return Spec.make(shape, torch.bfloat16, placement, layout)


def plain_svg(svg: str) -> str:
    """Return an SVG without its style, which a page has once for all drawings."""
    return re.sub(r"<style>.*?</style>", "", svg)


@pytest.mark.parametrize("name", [name for name, _, _ in UNEVEN])
def test_drawings_are_those_of_sharding_svg(name: str) -> None:
    spec, devices = uneven_spec(name), data(uneven())["devices"]
    layout = tuple(e.short for e in spec.layout)
    drawing = devices["drawings"][drawing_key(spec.shape, layout, "bfloat16", 0)]
    svg = flow.sharding_svg(spec)
    assert drawing["svg"] == plain_svg(svg)
    assert f"<style>{devices['style']}</style>" in svg
    assert drawing["plane"].count(None) == max(0, 2 - len(spec.shape))
    for rank, _, text, box in drawing["cells"]:
        assert (tuple(box[0]), tuple(box[1])) == spec.box(rank)
        assert text == held_slices(spec, rank)
    assert len(drawing["cells"]) == 8


def test_slices_in_words_are_those_of_the_table_of_ranks() -> None:
    for name, *_ in UNEVEN:
        spec = uneven_spec(name)
        for rank, (*_, slices) in zip(spec.placement.flat, rank_rows(spec), strict=True):
            text = held_slices(spec, rank)
            for begin_end in re.findall(r"\d+:\d+", text):
                assert begin_end in slices, (name, rank, text, slices)
            assert ("summand" in text or "partial" in text) == ("P" in slices)
            assert ("the full tensor" in text) == (not any(e.is_split for e in spec.layout))


def test_results_of_calls_are_drawn_without_a_dtype() -> None:
    devices = data(layered(1))["devices"]
    drawing = devices["drawings"][drawing_key((8, 16), ("S(0)", "P"), "", 0)]
    assert "[8, 16] S(0) P" in drawing["svg"]
    assert "f32" not in drawing["svg"]
    assert drawing["partial"]


def test_the_first_tensors_are_the_largest_parameter_and_the_input() -> None:
    devices = data(layered(3))["devices"]
    first = [devices["tensors"][i] for i in devices["first"]]
    assert [(t["name"], t["kind"]) for t in first] == [
        ("blocks.*.up.weight", "parameter"),
        ("input_0", "input"),
    ]
    assert first[0]["names"] == [f"blocks.{i}.up.weight" for i in range(3)]


def test_tensors_stand_on_the_devices_of_their_stage() -> None:
    devices = data(pipelined(4))["devices"]
    assert [(g["title"], g["modules"], g["ranks"], g["mesh"]) for g in devices["groups"]] == [
        ("stage 0", "blocks.{0-1}", [0, 1, 2, 3], [2, 2]),
        ("stage 1", "blocks.{2-3}", [4, 5, 6, 7], [2, 2]),
    ]
    groups = {t["name"]: t["group"] for t in devices["tensors"]}
    assert groups["blocks.{0-1}.down.weight"] == 0
    assert groups["blocks.{2-3}.down.weight"] == 1
    (sharded,) = (t for t in devices["tensors"] if t["name"] == "blocks.{0-1}.up.weight")
    assert "ZeRO stage 3 stores it as S(0) B" in sharded["note"]
    drawing = devices["drawings"][drawing_key((64, 16), ("B", "S(0)"), "float32", 1)]
    assert [rank for rank, *_ in drawing["cells"]] == [4, 5, 6, 7]


def test_nodes_are_those_of_the_cluster() -> None:
    plan = layered(1)
    assert data(plan)["devices"]["node_size"] == 0  # eight devices are one node
    two = dataclasses.replace(plan, mesh=(4, 4))
    assert data(two)["devices"]["node_size"] == 8
    assert data(dataclasses.replace(two, cluster="my cluster"))["devices"]["node_size"] == 0


def test_a_page_of_many_layouts_stays_small() -> None:
    """Drawings are limited in number, and each distinct layout is drawn once."""
    many = tuple(
        PlacedTensor(f"w{i}", "parameter", (i + 8, 16), "float32", ("S(0)", "B"), 64)
        for i in range(200)
    )
    devices = data(dataclasses.replace(layered(1), placed=many))["devices"]
    assert len(devices["drawings"]) == 60
    assert len(devices["tensors"]) == 200
    assert len(data(layered(50))["devices"]["drawings"]) == len(
        data(layered(2))["devices"]["drawings"]
    )


# ---------------------------------------------------------------------------- cost and model's name


@pytest.mark.parametrize(
    ("bound", "predicted", "cards"),
    [
        (1.0, 1.0, [("step time", "20 ms", "proven minimal")]),
        (0.9999, 1.0, [("step time", "20 ms", "at most under 0.1 % above the minimum")]),
        (
            0.5,
            1.0,
            [
                ("step time", "20 ms", "predicted; the search minimised it"),
                ("lower bound", "10 ms", "no plan in the search space costs less"),
            ],
        ),
        (
            1.0,
            0.5,
            [
                (
                    "cost",
                    "20 ms",
                    "the sum of all prices, which the search minimised; proven minimal",
                ),
                ("predicted step time", "10 ms", "simulated, with communication that overlaps"),
            ],
        ),
        (
            0.5,
            0.75,
            [
                ("cost", "20 ms", "the sum of all prices, which the search minimised"),
                ("predicted step time", "15 ms", "simulated, with communication that overlaps"),
                ("lower bound", "10 ms", "no plan in the search space costs less"),
            ],
        ),
    ],
    ids=["all agree", "agree as shown", "bound differs", "prediction differs", "all differ"],
)
def test_figures_that_agree_share_a_card(
    bound: float, predicted: float, cards: list[tuple[str, str, str]]
) -> None:
    plan = dataclasses.replace(layered(1), cost=0.02, bound=0.02 * bound, seconds=0.02 * predicted)
    assert cost_cards(plan) == cards


def test_a_plan_that_lost_layouts_to_errors_is_not_called_minimal() -> None:
    plan = dataclasses.replace(
        layered(1), cost=0.02, bound=0.02, seconds=0.02, lost=(Lost("gelu", "KeyError: 'k'", 1, 1),)
    )
    assert cost_cards(plan) == [
        ("step time", "20 ms", "minimal among the plans that the search could price")
    ]


def test_the_name_of_the_model_is_saved_and_is_in_the_title(tmp_path: Path) -> None:
    plan = dataclasses.replace(layered(1), model="GPT")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert (loaded, loaded.model) == (plan, "GPT")
    assert data(plan)["plan"]["model"] == "GPT"
    assert plan.report() == layered(1).report()
    plan.save_html(tmp_path / "plan.html", model="GPT-2 small")
    assert (tmp_path / "plan.html").read_text() == page(
        dataclasses.replace(plan, model="GPT-2 small")
    )
    fields = json.loads((tmp_path / "plan.json").read_text())
    del fields["model"]  # a file of an older version
    (tmp_path / "old.json").write_text(json.dumps(fields))
    old = Plan.load(tmp_path / "old.json")
    assert (old, old.model) == (plan, "")  # the name is no part of equality


# ------------------------------------------------------------------------------------------ browser

DRIVE = """
<script>
setTimeout(() => {
  const at = (id) => document.getElementById(id), tree = at("tree"), seen = {};
  const key = (target, k) => target.dispatchEvent(new KeyboardEvent("keydown", { key: k, bubbles: true, cancelable: true }));
  seen.title = document.title;
  seen.rows = Number(tree.getAttribute("aria-rowcount"));
  seen.over = document.documentElement.scrollWidth - innerWidth;
  at("open").click();
  seen.opened = Number(tree.getAttribute("aria-rowcount"));
  seen.drawn = tree.querySelectorAll(".row").length;
  for (let i = 0; i < 3; i++) key(tree, "ArrowDown");
  key(tree, "Enter");
  seen.selected = tree.querySelector("[aria-selected=true]").id === tree.getAttribute("aria-activedescendant");
  seen.about = at("about").textContent;
  key(tree, "End");
  seen.last = tree.querySelector("[aria-selected=true]").getAttribute("aria-rowindex");
  at("find").value = "linear_1"; at("find").dispatchEvent(new Event("input"));
  seen.found = [...tree.querySelectorAll(".row.call")].length;
  tree.querySelector(".row.call").click();
  seen.why = at("about").textContent;
  const heads = [...document.querySelectorAll("#changes th button")];
  const first = () => document.querySelector("#changes tbody tr").textContent;
  heads[3].click(); const down = first(); heads[3].click();
  seen.sorted = [down !== first(), document.querySelector("#changes th[aria-sort=ascending]").textContent];
  key(document.querySelector("#canvas canvas"), "+");
  seen.timeline = at("at").textContent;
  const area = document.querySelector("#area svg");
  if (area) key(area, "ArrowRight");
  seen.moment = area && document.querySelector("#area .tip").textContent;
  seen.stages = [...document.querySelectorAll("#stages tbody tr")].map((row) => [...row.children].map((cell) => cell.textContent));
  seen.legend = at("memory-legend").textContent;
  seen.bars = document.querySelectorAll("#bars .bar").length;
  document.querySelector("#changes tbody button").click();
  seen.led = at("about").textContent.length > 0;
  document.body.setAttribute("data-seen", JSON.stringify(seen));
}, 500);
</script>
"""  # noqa: E501


LOOK = """
<script>
setTimeout(() => {
  const at = (id) => document.getElementById(id), all = (css) => [...document.querySelectorAll(css)], seen = {};
  const texts = (css) => all(css).map((e) => e.textContent);
  const width = document.documentElement.clientWidth;
  seen.width = width;
  const name = (e) => `${e.tagName} ${e.id} ${e.getAttribute("class")} ${e.textContent.slice(0, 40)}`;
  seen.wide = all("body *").filter((e) => e.getBoundingClientRect().width && e.getBoundingClientRect().right > width + 1).map(name);
  seen.clipped = all("body *").filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth && getComputedStyle(e).overflowX !== "visible").map(name);
  seen.first = document.querySelector("main section").id;
  seen.heading = at("title").textContent;
  seen.title = document.title;
  seen.sections = texts("#sections a");
  seen.cards = all("#tiles > div").map((e) => [...e.querySelectorAll("dt, dd")].map((x) => (x.firstChild || x).textContent).concat(e.querySelector("small").textContent));
  seen.columns = texts("#head > div");
  seen.hidden_columns = all("#head > div, #rows .row > div").filter((e) => !e.getBoundingClientRect().width).length;
  seen.table_cells = all("#changes tbody tr:first-child td").map((e) => [e.dataset.title, e.textContent, e.getBoundingClientRect().width > 0]);
  seen.panels = all(".panel").map((p) => ({
    tensor: p.querySelector("select").selectedOptions[0].textContent,
    devices: [...p.querySelectorAll(".device")].map((d) => [d.querySelector("b").textContent, (d.querySelector("span") || { textContent: "" }).textContent]),
    axes: [...p.querySelectorAll(".axis")].map((e) => e.textContent),
    groups: [...p.querySelectorAll(".group h3")].map((e) => e.textContent),
    svg: new XMLSerializer().serializeToString(p.querySelector("svg.gt-svg[role=img]")),
  }));
  seen.every = [...document.querySelector(".panel select").options].map((option, i) => {
    const select = document.querySelector(".panel select");
    select.value = i; select.dispatchEvent(new Event("change"));
    const panel = select.closest(".panel");
    return { parts: [...panel.querySelectorAll(".map")].map((m) => [...m.querySelectorAll("rect")].map((r) => ["x", "y", "width", "height"].map((k) => Number(r.getAttribute(k))))),
      hatched: panel.querySelectorAll(".map .hatch").length, svg: new XMLSerializer().serializeToString(panel.querySelector("svg.gt-svg[role=img]")) };
  });
  const hint = () => (at("hint").hidden ? null : at("hint").textContent);
  const marks = all("#placed .lay b");
  seen.before = hint();
  marks[0].focus();
  seen.focused = [marks[0].textContent, hint(), marks[0].getAttribute("aria-describedby")];
  const box = at("hint").getBoundingClientRect();
  seen.hint_inside = box.left >= 0 && box.right <= width && box.height > 0;
  document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
  seen.escaped = hint();
  const row = document.querySelector("#rows .row .lay b");
  row.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  seen.hovered = [row.textContent, hint()];
  row.dispatchEvent(new PointerEvent("pointerout", { bubbles: true }));
  seen.left = hint();
  const tree = at("tree"), selected = () => document.querySelector("#rows .row.at .lay b"), arrow = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  selected().focus();
  tree.dispatchEvent(new Event("scroll"));  // the rows are drawn again
  seen.repainted = document.activeElement === selected() && hint() !== null;
  arrow("ArrowDown");
  seen.moved = document.activeElement === tree && hint() === null;
  arrow("ArrowUp");
  seen.unreachable = all(".lay b").filter((b) => !b.closest(".row:not(.at)") && b.tabIndex !== 0).length;
  seen.unexplained = all(".lay b").filter((b) => !b.explain || !b.explain()).length;
  const area = document.querySelector("#area svg");
  if (area) {
    const view = area.viewBox.baseVal;
    seen.limit = all("#area .limit").map((e) => [Number(e.getAttribute("y1")), view.height]);
    seen.limit_word = texts("#area .limit-word").join();
    seen.broken = all("#area .break").length;
  }
  seen.memory = at("memory").textContent;
  seen.internals_open = at("internals").open;
  seen.internals = at("choices").textContent;
  seen.chosen = texts("#chosen li");
  seen.searched = texts("#searched li");
  seen.others = [at("others").hidden, texts("#bars .bar div:first-child"), at("not-priced").textContent];
  seen.text = document.querySelector("main").innerText;
  parent.document.body.setAttribute("data-seen", JSON.stringify(seen));
}, 500);
</script>
"""  # noqa: E501


def opened(
    text: str,
    tmp_path: Path,
    size: tuple[int, int] = (1200, 900),
    dark: bool = False,
    script: str = DRIVE,
    frame: int | None = None,
) -> dict[str, Any]:
    """Open a page, run a script on it, and return what the script has recorded. Fails if the
    browser's console shows a message. ``frame``: the page is in a frame of this width in px,
    because a window has a minimum width."""
    assert CHROMIUM is not None
    file = tmp_path / "plan.html"
    driven = text.replace("</body>", script + "</body>")
    if frame is not None:
        style = f"width: {frame}px; height: 850px; border: 0"
        driven = f'<body><iframe style="{style}" srcdoc="{html.escape(driven)}"></iframe></body>'
    file.write_text(driven, encoding="utf-8")
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=4000",
        "--hide-scrollbars", "--enable-logging=stderr", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    command[1:1] = ["--blink-settings=preferredColorScheme=0"] if dark else []
    browser = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = browser.communicate(timeout=120)
    finally:
        try:
            os.killpg(browser.pid, signal.SIGKILL)  # always with its helper processes
        except ProcessLookupError:
            pass
        browser.wait(timeout=30)
    said = [line for line in err.splitlines() if "CONSOLE" in line]
    assert not said, "\n".join(said)
    (body,) = [about for tag, about in Elements(out).elements if tag == "body"]
    assert body.get("data-seen"), f"the page was not driven to the end:\n{err[-2000:]}"
    return json.loads(body["data-seen"] or "")  # type: ignore[no-any-return]


@needs_browser
@pytest.mark.parametrize(
    ("size", "dark"),
    [pytest.param((1200, 900), False, marks=pytest.mark.extended), ((400, 800), True)],
    ids=["wide and light", "narrow and dark"],
)
def test_the_page_works_in_a_browser(size: tuple[int, int], dark: bool, tmp_path: Path) -> None:
    plan = layered(4)
    seen = opened(page(plan), tmp_path, size, dark)
    assert seen["title"] == plan.report().splitlines()[0]
    assert seen["over"] <= 0, "the page is wider than the window"
    assert seen["opened"] > seen["rows"] > 5
    assert seen["selected"]
    assert int(seen["last"]) == seen["opened"]
    assert seen["found"] == 1
    for word in (
        "linear_1",
        "blocks.0.down",
        "all_reduce of linear_1",
        "why",
        "instead",
        "+2 ms, 1.0 KiB a rank more",
    ):
        assert word in seen["why"], seen["why"]
    assert "all_reduce of the gradient of blocks.0.up.weight" in seen["about"]
    assert "[object" not in seen["about"] + seen["why"]
    assert seen["sorted"] == [True, "bytes"]
    assert "a rank" in seen["moment"]
    assert "activations" in seen["legend"]
    assert seen["bars"] == 1 + len(plan.alternatives)
    assert seen["led"]


def test_memory_of_stages_over_time_peaks_where_the_simulation_does() -> None:
    kinds = [
        StageTimes(1e-3, 2e-3, kept=1000.0, activations=300.0, passing=50.0, first=0, ranks=4),
        StageTimes(1e-3, 2e-3, kept=900.0, activations=200.0, first=4),
    ]
    for name, peaks in (
        ("1f1b", [1000 + 2 * 300 + 50, 900 + 200]),
        ("gpipe", [1000 + 8 * 300 + 50, 900 + 8 * 200]),
        ("zb-h1", None),
    ):
        run = step(kinds, name, (0, 1), 8, Cluster())
        plan = pipelined(4)
        stages = [
            {**s, "costs": dataclasses.asdict(k)}
            for s, k in zip(plan.choices["stages"], kinds, strict=True)
        ]
        lanes = data(
            dataclasses.replace(
                plan, choices={**plan.choices, "stages": stages}, timeline=run.trace()
            )
        )["lanes"]
        assert [lane["name"] for lane in lanes] == ["ranks 0-3", "rank 4"]
        found = [max(level for _, level in lane["steps"]) for lane in lanes]
        assert found == list(run.memory), name
        assert peaks is None or found == peaks


@needs_browser
def test_a_plan_in_stages_is_shown(tmp_path: Path) -> None:
    line = trace(simulated=simulate(schedule("1f1b", (0, 1), micros=8), {"F": 1e-3, "B": 2e-3}))
    seen = opened(page(pipelined(4), line), tmp_path)
    assert seen["stages"] == [
        ["0", "0", "0-3", "2x2", "blocks.{0-1}", "blocks.0", "19.5 KiB"],
        ["1", "1", "4-7", "2x2", "blocks.{2-3}", "nothing", "18.6 KiB"],
    ]
    assert seen["moment"] is None
    assert "27 ms in all, simulated" in seen["timeline"]  # (8 + 2 - 1) * 3 ms
    assert "have not been priced one by one" in seen["why"]


@needs_browser
def test_of_a_large_plan_only_what_is_in_sight_is_drawn(tmp_path: Path) -> None:
    plan = layered(400)
    assert len(plan.calls) > 1500
    pipelined = trace(
        pipeline=simulate(schedule("1f1b", tuple(range(8)), micros=32), {"F": 1.0, "B": 2.0})
    )
    seen = opened(page(plan, pipelined), tmp_path)
    assert seen["opened"] > 2500
    assert seen["drawn"] < 100


@needs_browser
def test_names_with_markup_do_no_harm(tmp_path: Path) -> None:
    seen = opened(page(layered(2, prefix="<img src=x onerror=alert(1)>&amp;")), tmp_path)
    assert "<img src=x onerror=alert(1)>&amp;.0.down" in seen["why"]


PHONE = 420  # px


#: What was seen of a page, by its text and frame: several tests look at the same page.
SEEN: dict[tuple[str, int | None], dict[str, Any]] = {}


def looked_at(plan: Plan, tmp_path: Path, frame: int | None = None) -> dict[str, Any]:
    text = page(plan)
    if (text, frame) not in SEEN:
        SEEN[text, frame] = opened(text, tmp_path, script=LOOK, frame=frame)
    return copy.deepcopy(SEEN[text, frame])


def three_layers() -> Plan:
    """Return the plan that most tests look at."""
    return dataclasses.replace(layered(3), model="GPT")


@needs_browser
@pytest.mark.parametrize("make", [layered, pipelined], ids=["one mesh", "stages"])
@pytest.mark.sweep(2)
def test_nothing_is_lost_on_a_phone(make: Any, tmp_path: Path) -> None:
    seen = looked_at(make(4), tmp_path, PHONE)
    assert seen["width"] == PHONE
    assert seen["wide"] == []
    assert seen["clipped"] == []
    assert seen["hidden_columns"] == 0
    assert seen["columns"] == ["call", "layout", "bytes", "computing", "communication"]
    assert all(visible for _, text, visible in seen["table_cells"] if text)
    assert [title for title, *_ in seen["table_cells"]] == [
        "tensor", "times", "layout", "bytes", "forward", "gradient", "total", "used by",
    ]  # fmt: skip
    assert seen["hint_inside"]


@needs_browser
def test_no_number_is_cut_on_a_desktop(tmp_path: Path) -> None:
    """Calls of 512.0 KiB and 1.0 MiB: the longest numbers that the columns have to show."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    seen = looked_at(flow.auto.plan(model, torch.empty(512, 512), "dgx-h100", mesh=(8,)), tmp_path)
    assert seen["clipped"] == []


@needs_browser
def test_the_page_begins_with_the_devices(tmp_path: Path) -> None:
    seen = looked_at(three_layers(), tmp_path)
    assert seen["heading"] == "GPT"
    assert seen["title"].startswith("GPT: plan for 8 devices of dgx-h100, ")
    assert seen["first"] == "devices"
    parameter, given = seen["panels"]
    assert parameter["tensor"] == "blocks.*.up.weight (parameter)"
    assert parameter["axes"] == ["axis 0 = 0", "axis 0 = 1"]
    rows = ["rows 0:16", "rows 16:32", "rows 32:48", "rows 48:64"]
    assert parameter["devices"] == [[f"rank {rank}", rows[rank % 4]] for rank in range(8)]
    assert given["tensor"] == "input_0 (input)"
    assert given["devices"] == [
        [f"rank {rank}", ("rows 0:4", "rows 4:8")[rank // 4]] for rank in range(8)
    ]


def shown(svg: str) -> list[tuple[str, dict[str, str], str]]:
    """Return (tag, attributes, text) of the elements of an SVG, without its style."""
    return [
        (e.tag.rpartition("}")[2], dict(e.attrib), e.text or "")
        for e in ElementTree.fromstring(svg).iter()
        if not e.tag.endswith("style")
    ]


@needs_browser
def test_the_drawings_in_the_browser_agree_with_sharding_svg(tmp_path: Path) -> None:
    plan = uneven()
    seen = looked_at(plan, tmp_path)
    order = [t["name"] for t in data(plan)["devices"]["tensors"]]
    assert sorted(order) == sorted(name for name, *_ in UNEVEN)
    for name, drawn in zip(order, seen["every"], strict=True):
        spec = uneven_spec(name)
        assert shown(drawn["svg"]) == shown(flow.sharding_svg(spec)), name
        held = [rank for rank in spec.placement.flat if 0 not in spec.box(rank)[1]]
        assert drawn["hatched"] == (len(held) if any(e.is_partial for e in spec.layout) else 0)
        down, across = data(plan)["devices"]["drawings"][
            drawing_key(spec.shape, tuple(e.short for e in spec.layout), "bfloat16", 0)
        ]["plane"]
        for rank, rects in zip(spec.placement.flat, drawn["parts"], strict=True):
            *part, outline = rects
            assert len(part) == (rank in held), (name, rank)
            if not part:
                continue
            (x, y, width, height), (_, _, whole_width, whole_height) = part[0], outline
            offsets, lengths = spec.box(rank)
            if across is not None:
                n = spec.shape[across]
                assert (x / whole_width, width / whole_width) == pytest.approx(
                    (offsets[across] / n, lengths[across] / n)
                )
            if down is not None:
                n = spec.shape[down]
                assert (y / whole_height, height / whole_height) == pytest.approx(
                    (offsets[down] / n, lengths[down] / n)
                )


@needs_browser
def test_marks_are_explained_under_the_pointer_and_at_focus(tmp_path: Path) -> None:
    seen = looked_at(three_layers(), tmp_path)
    assert seen["before"] is None
    mark, sentence, described = seen["focused"]
    assert (mark, described) == ("B", "hint")
    assert sentence == "B: replicated over mesh axis 0 (2 devices): each holds the same data."
    assert seen["escaped"] is None
    mark, sentence = seen["hovered"]
    assert mark == "S(0)"
    assert sentence == (
        "S(0): split on dim 0 over mesh axis 0 (2 devices): each holds 4 of 8 rows."
    )
    assert seen["left"] is None
    assert seen["repainted"]
    assert seen["moved"]
    assert seen["unreachable"] == seen["unexplained"] == 0


@needs_browser
@pytest.mark.parametrize(
    ("factor", "broken", "words"),
    [
        (1.02, 0, "limit 36.5 KiB"),
        (2, 0, "limit 71.6 KiB"),
        (1000, 1, "limit 35.0 MiB (1000 times the peak; not to scale)"),
        (None, 0, ""),
    ],
    ids=["at the peak", "near", "far above", "none"],
)
@pytest.mark.sweep(4)
def test_the_limit_is_in_the_memory_chart(
    factor: float | None, broken: int, words: str, tmp_path: Path
) -> None:
    plan = layered(3)
    plan = dataclasses.replace(plan, limit=None if factor is None else int(factor * plan.memory))
    seen = looked_at(plan, tmp_path)
    assert len(seen["limit"]) == (factor is not None)
    assert all(0 < y < height for y, height in seen["limit"])
    assert seen["limit_word"] == words
    assert seen["broken"] == broken


@needs_browser
def test_one_card_shows_a_step_time_that_is_proven_minimal(tmp_path: Path) -> None:
    plan = three_layers()
    seen = looked_at(dataclasses.replace(plan, bound=plan.cost), tmp_path)
    assert seen["cards"][0] == ["step time", "21.8 ms", "proven minimal"]
    assert [name for name, *_ in seen["cards"]] == ["step time", "peak memory", "devices"]
    names = [name for name, *_ in looked_at(plan, tmp_path)["cards"]]
    assert names == ["step time", "lower bound", "peak memory", "devices"]


@needs_browser
def test_choices_are_sentences_and_the_solver_is_folded_away(tmp_path: Path) -> None:
    seen = looked_at(pipelined(4), tmp_path)
    assert seen["internals_open"] is False
    assert "solving seconds" in seen["internals"]
    assert seen["chosen"] == [
        "The model runs in 2 pipeline stages of 4 devices each (a mesh of 2 x 2).",
        "Of 12 parameters, 8 are split and 4 are replicated.",
        "A step runs 8 micro-batches in the schedule 1f1b.",
        "Backward recomputes blocks.0, to save memory.",
        "ZeRO shards 4 parameters or their optimizer state.",
    ]
    assert seen["searched"] == [
        "The search compared the layouts of 17 calls and 13 parameters and inputs in 250 ms.",
        "The minimum is not proven: a plan that costs up to 10 % less may exist.",
    ]
    assert "limit" in seen["memory"]  # also without memory over time


@needs_browser
def test_labels_are_the_words_of_the_field(tmp_path: Path) -> None:
    text = looked_at(three_layers(), tmp_path)["text"].lower()
    for word in (
        "used by",
        "communication",
        "parameters and inputs",
        "layout changes",
        "reset zoom",
    ):
        assert word in text, word
    for word in (
        "taken by",
        "dearest",
        "given tensors",
        "whole",
        "moving",
        "lies",
        "as dear",
        "boxing",
    ):
        assert word not in text, word


class Step(flow.nn.Graph):
    """A training step that searches for its layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 8).to_global(flow.placement.all("cpu"), flow.sbp.broadcast)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.config.enable_auto_parallel()

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


@needs_browser
def test_the_plan_of_a_graph_has_alternatives_or_says_how_to_get_them(tmp_path: Path) -> None:
    step, x = Step(), torch.randn(4, 8).to_global(flow.placement.all("cpu"), flow.sbp.broadcast)
    step(x)
    hidden, bars, note = looked_at(step.auto_plan(), tmp_path)["others"]
    assert not hidden
    assert bars == ["this plan", "data parallel"]
    assert note == (
        "Not priced: tensor parallel, fully sharded (ZeRO-3). The search of graphs and of "
        "parallelize prices data parallel only; flow.auto.plan(model_or_graph, inputs) prices all."
    )
    # the call in the note does price them
    every = flow.auto.plan(Step(), (x,), "cpu", mesh=(1,))
    hidden, bars, note = looked_at(every, tmp_path)["others"]
    assert set(bars) == {"this plan", *every.alternatives}
    assert len(bars) == 4
    assert (hidden, note) == (False, "")


@needs_browser
def test_a_plan_without_alternatives_says_how_to_get_them(tmp_path: Path) -> None:
    plan = dataclasses.replace(layered(1), alternatives={})
    hidden, bars, note = looked_at(plan, tmp_path)["others"]
    assert not hidden
    assert bars == []
    assert "flow.auto.plan(model_or_graph, inputs) prices all" in note


def test_plans_are_named_after_the_class_of_the_model() -> None:
    x = torch.randn(4, 8)
    assert flow.auto.plan(nn.Linear(8, 8), (x,), "cpu", mesh=(2,)).model == "Linear"
    assert flow.auto.plan(nn.Linear(8, 8), (x,), "dgx-h100").model == "Linear"
    placement = flow.placement.all("cpu")
    model = flow.parallelize(nn.Linear(8, 8), placement, "auto", inputs=(x,))
    assert flow.auto.plan_of(model).model == "Linear"
    step, given = Step(), x.to_global(placement, flow.sbp.broadcast)
    step(given)
    assert step.auto_plan().model == "Linear"
    assert flow.auto.plan(Step(), (given,), "cpu", mesh=(1,)).model == "Linear"
