"""The Grafana board: all that its queries name is exported, and a real Prometheus answers them."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

pytest.importorskip("prometheus_client")

import prometheus_client

from cxl_offload import Session
from cxl_offload.metrics import MetricsReader, PrometheusCollector, serve
from cxl_offload.topology import discover
from cxl_offload.topology.hazards import find_hazards
from cxl_offload.topology.health import read_health
from cxl_offload.topology.tree import Tree

from ..topology.test_hazards import controller, healthy, link_errors, lost_pages
from .board import BOARD, TARGET_LABELS, Query, queries, read_board
from .board_work import MIB, Work
from .real_prometheus import RealPrometheus, Series, is_there

needs_prometheus = pytest.mark.skipif(
    not is_there(), reason="prometheus is not installed; Debian has it as a package"
)
_ENOUGH_S = 60


def collector_of(root: Path) -> PrometheusCollector:
    """Of a process on a machine that was captured: two errors, and what doctor finds."""
    session = Session.linux(discover(root))
    made = PrometheusCollector(session)
    made._reader = MetricsReader(
        session,
        find=lambda: find_hazards(root),
        look=lambda machine: read_health(Tree(root), machine),
    )
    return made


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    root = healthy(tmp_path / "tree")
    lost_pages(total=3, recovered=2, failed=1)(root)
    controller(7, 1)(root)
    link_errors("correctable", "TOTAL_ERR_COR", 9)(root)
    return root


@pytest.fixture
def work() -> Work:
    """Every tuner has decided, and every kind is alive."""
    made = Work()
    for _ in range(40):
        made.step()
    return made


def exported(*collectors: PrometheusCollector) -> dict[str, set[str]]:
    """Name to labels of all samples that are really there."""
    found: dict[str, set[str]] = {}
    for collector in collectors:
        for family in collector.collect():
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_all_that_queries_name_is_exported(work: Work, broken: Path) -> None:
    there = exported(PrometheusCollector(work.session), collector_of(broken))
    every = list(queries())
    assert len(every) > 15
    for query in every:
        assert query.metrics, query
        assert query.metrics <= set(there), query
        labels = set[str]().union(*(there[name] for name in query.metrics))
        assert query.labels <= labels | TARGET_LABELS, query
    variables = [
        found
        for variable in read_board()["templating"]["list"]
        if variable["type"] == "query"
        for found in [re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])]
    ]
    assert variables
    for found in variables:
        assert found is not None
        assert found[1] in there
        assert found[2] in there[found[1]] | TARGET_LABELS


def test_query_with_a_wrong_metric_or_label_would_be_seen() -> None:
    """What the test above goes by."""
    query = Query("x", 'sum by (kin) (rate(cxl_offload_no{teir="cxl"}[5m]))', "{{nodee}}")
    assert query.metrics == {"cxl_offload_no"}
    assert query.labels == {"kin", "teir", "nodee"}
    joined = Query("x", "a * on (instance, job) group_left (machine) cxl_offload_info")
    assert joined.labels == {"instance", "job", "machine"}


def test_units_fit_what_is_asked_for() -> None:
    """A query of bytes is shown in bytes, a rate of bytes in bytes a second, a count in neither."""
    for panel in read_board()["panels"]:
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            text = target["expr"]
            is_rate, is_share = "rate(" in text, " / (" in text
            of_bytes = "_bytes" in text and not is_share
            expected = {
                (True, False): {"bytes"},
                (True, True): {"Bps"},
                (False, True): {"ops"},
                (False, False): {"percentunit"} if is_share else {"none", "short"},
            }[of_bytes, is_rate]
            assert unit in expected, panel["title"]


def test_values_that_stand_alone_are_those_of_now() -> None:
    """Over a range Grafana would show the last value of a process that has ended."""
    for panel in read_board()["panels"]:
        if panel["type"] in ("stat", "table"):
            assert all(target.get("instant") for target in panel["targets"]), panel["title"]


def test_board_can_be_provisioned() -> None:
    board = read_board()
    assert board["title"]
    assert board["uid"]
    assert board["id"] is None  # Grafana gives it
    assert "__inputs" not in board  # asked for by hand, which provisioning cannot
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in board["panels"]]
    assert len({panel["id"] for panel in board["panels"]}) == len(places)
    for x, y, w, h in places:
        assert x >= 0
        assert x + w <= 24
        for other in places:
            if other != (x, y, w, h):
                apart = other[0] >= x + w or x >= other[0] + other[2]
                assert apart or other[1] >= y + h or y >= other[1] + other[3]
    folder = BOARD.parents[1] / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    uids = {panel["datasource"]["uid"] for panel in board["panels"] if "datasource" in panel}
    assert uids == {"${source}"}
    (provider,) = yaml.safe_load((folder / "dashboards.yaml").read_text())["providers"]
    assert provider["type"] == "file"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with prometheus")
def test_promtool_finds_no_fault_in_the_queries(tmp_path: Path) -> None:
    rules = [
        {"record": f"board:query{number}", "expr": query.filled(instance=".+", rate_interval="5m")}
        for number, query in enumerate(queries())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


@dataclass
class Scraped:
    """A Prometheus that scrapes two processes of ours, which are both this one."""

    prometheus: RealPrometheus
    work: Work
    working: str
    broken: str

    def ask(self, panel: str, instance: str, number: int = 0) -> list[Series]:
        found = [query for query in queries() if query.panel == panel]
        return self.prometheus.query(found[number].filled(instance=instance, rate_interval="2s"))

    def values(self, panel: str, instance: str, *labels: str, number: int = 0) -> dict[str, float]:
        """Values of the labels, with blanks between them, to what is shown."""
        return {
            " ".join(series["metric"].get(label, "") for label in labels): float(series["value"][1])
            for series in self.ask(panel, instance, number)
        }


@pytest.fixture
def scraped(work: Work, broken: Path, tmp_path: Path) -> Iterator[Scraped]:
    registry = prometheus_client.CollectorRegistry()
    registry.register(collector_of(broken))
    other, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)
    folder = tmp_path / "prometheus"
    folder.mkdir()
    try:
        with serve(0, session=work.session) as server:
            working, broke = (f"127.0.0.1:{port}" for port in (server.port, int(other.server_port)))
            with RealPrometheus(folder, [working, broke], every_s=0.5) as prometheus:
                yield Scraped(prometheus, work, working, broke)
    finally:
        other.shutdown()
        other.server_close()
        thread.join()


def answered(scraped: Scraped) -> set[str]:
    """Queries that give a number, of one of the two processes."""
    return {
        query.text
        for query in queries()
        for instance in (scraped.working, scraped.broken)
        for series in scraped.prometheus.query(query.filled(instance=instance, rate_interval="2s"))
        if float(series["value"][1]) == float(series["value"][1])
    }


@needs_prometheus
def test_prometheus_answers_every_query_with_what_the_processes_hold(scraped: Scraped) -> None:
    end = time.monotonic() + _ENOUGH_S
    missing = {query.text for query in queries()}
    while missing and time.monotonic() < end:
        scraped.work.step()
        time.sleep(0.2)
        missing = {query.text for query in queries()} - answered(scraped)
    assert not missing
    rates = scraped.values("Copies to and from GPUs", scraped.working, "direction", "node")
    assert {"to_device 0", "to_device 2", "to_host 0"} <= set(rates)
    assert all(rate > 0 for rate in rates.values())

    stats = scraped.work.session.stats()  # nothing works any more
    held = {str(node): use.current_bytes for node, use in stats.nodes.items()}
    while scraped.values("Asked for", scraped.working) != {"": stats.asked_bytes.current}:
        assert time.monotonic() < end, "the last state is never scraped"
        time.sleep(0.2)
    assert scraped.values("Held by node", scraped.working, "node") == held
    share = scraped.values("On CXL", scraped.working)[""]
    assert share == pytest.approx(held["2"] / sum(held.values()))
    lost = scraped.values("Rounding and caches", scraped.working)[""]
    assert lost == stats.mapped_bytes.current - stats.asked_bytes.current
    weights = scraped.values("Kinds, by tier", scraped.working, "kind", "tier")
    assert (weights["weights ldram"], weights["weights cxl"]) == (32 * MIB, 64 * MIB)


@needs_prometheus
def test_prometheus_shows_what_sums_alone_would_hide(scraped: Scraped, broken: Path) -> None:
    end = time.monotonic() + _ENOUGH_S
    both = f"{scraped.working}|{scraped.broken}"
    while len(scraped.ask("Processes", both)) < 2:
        assert time.monotonic() < end
        time.sleep(0.2)
    unplaced = scraped.values(
        "Kinds, requested and not known to be placed", scraped.working, "kind"
    )
    assert unplaced == {"activations": 8 * MIB, "kv": 0, "optimizer": 0, "weights": 0}
    free = scraped.values("Free, by node", both, "machine", "node")
    session, other = scraped.work.session, discover(broken).name
    node = session.machine.node(0)
    assert free[f"{session.machine.name} 0"] == session.free_bytes(0) / node.capacity_bytes
    assert f"{other} 0" in free, "a node 0 of another machine, which is another node"
    title = "Errors of memory, since the machines started"
    assert scraped.values(title, both, "node", "tier") == {"2 cxl": 3}
    assert scraped.values(title, both, "card", "severity", number=1) == {
        "0000:0d:00.0 correctable": 9,
        "0000:0d:00.0 nonfatal": 0,
        "0000:0d:00.0 fatal": 0,
    }
    assert scraped.values(title, both, "controller", "severity", number=2) == {
        "mc0 corrected": 7,
        "mc0 uncorrected": 1,
    }
    findings = scraped.values("What doctor finds", both, "finding", "severity")
    assert findings["lost-pages error"] == 1
