"""Tests of a plan's page. The page is self-contained and its scripts are complete. If a browser is
available, the page runs there without errors."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.plans import layered, pipelined

import globaltensor
from globaltensor.auto.inter_op.step_simulator import StageTimes, step
from globaltensor.auto.plan.html import data, page
from globaltensor.auto.plan.plan import Plan
from globaltensor.cluster import Cluster
from globaltensor.graph.pipeline.schedule import schedule
from globaltensor.graph.pipeline.simulate import simulate
from globaltensor.graph.pipeline.timeline import trace

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
    assert set(re.findall(r"https?://[^\"' )]+", text)) <= {
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
    assert told["told"]["title"] == plan.report().splitlines()[0]
    assert dict(told["told"]["rest"])["schedule"] == "1f1b"


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
    program = "".join((FOLDER / f"{name}.js").read_text() for name in ("figures", "model")) + ROWS
    done = subprocess.run(
        [NODE, "-e", program],
        input=json.dumps(data(plan)),
        capture_output=True,
        text=True,
        timeout=60,
    )  # type: ignore[list-item]
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


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
  seen.legend = at("held").textContent;
  seen.bars = document.querySelectorAll("#bars .bar").length;
  document.querySelector("#changes tbody button").click();
  seen.led = at("about").textContent.length > 0;
  document.body.setAttribute("data-seen", JSON.stringify(seen));
}, 500);
</script>
"""  # noqa: E501


def opened(
    text: str, tmp_path: Path, size: tuple[int, int] = (1200, 900), dark: bool = False
) -> dict[str, Any]:
    """Open a page, run DRIVE on it, and return what DRIVE has recorded. Fails if the browser's
    console shows a message."""
    assert CHROMIUM is not None
    file = tmp_path / "plan.html"
    file.write_text(text.replace("</body>", DRIVE + "</body>"), encoding="utf-8")
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=4000",
        "--enable-logging=stderr", "--dump-dom", file.as_uri(),
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
    [((1200, 900), False), ((400, 800), True)],
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
