"""The endpoint: what it says, what it refuses, and that nobody waits for it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cxl_offload
from cxl_offload import ConfigError, Session, load_machine
from cxl_offload.metrics import (
    METRICS,
    MetricsReader,
    MetricsServer,
    PrometheusCollector,
    serve,
)
from cxl_offload.metrics.endpoint import MOST_CONNECTIONS
from cxl_offload.metrics.environment import serve_at
from cxl_offload.objects.kind_store import MemorySource, Part, TierStore
from cxl_offload.topology.hazards import Hazard
from cxl_offload.tune.counts import count_decision

from ..placement.child import run_in_child
from .conftest import of, page, scrape

MIB = 1 << 20


def test_endpoint_says_what_the_session_holds(session: Session) -> None:
    kept = cxl_offload.zeros(8 * MIB, dtype=torch.uint8, policy="interleave:ldram,cxl@64KiB")
    with serve(0) as server:
        found = scrape(server)
        del kept
        after = scrape(server)
    labels = {"machine": "epyc9354-cxl-a", "nodes": "simulated", "version": cxl_offload.__version__}
    assert of(found, "cxl_offload_info", **labels) == 1
    assert of(found, "cxl_offload_pool_asked_bytes") == 8 * MIB
    assert of(after, "cxl_offload_pool_asked_bytes") == 0
    assert of(after, "cxl_offload_pool_allocated_bytes_total") == 8 * MIB
    for node, tier in (("0", "ldram"), ("2", "cxl")):
        held = of(found, "cxl_offload_node_held_bytes", node=node, tier=tier)
        assert held == session.stats().nodes[int(node)].peak_bytes >= 4 * MIB
        capacity = of(found, "cxl_offload_node_capacity_bytes", node=node, tier=tier)
        free = of(found, "cxl_offload_node_free_bytes", node=node, tier=tier)
        assert capacity == session.machine.node(int(node)).capacity_bytes
        assert 0 < free <= capacity - held
    assert not any("findings" in name for name, _ in found)  # of this machine, not of that one


def test_page_has_a_help_and_a_type_for_each_metric(session: Session) -> None:
    kept = cxl_offload.zeros(MIB, dtype=torch.uint8, policy="cxl")
    count_decision("script", "share", "moved", nbytes=5)
    with serve(0, session=session) as server:
        lines = page(server).splitlines()
    shown = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {"cxl_offload_node_held_bytes", "cxl_offload_tune_decisions_total"} <= shown
    assert shown <= {metric.prometheus_name for metric in METRICS}
    for metric in METRICS:
        if metric.prometheus_name in shown:
            assert f"# HELP {metric.prometheus_name} {metric.text}" in lines
            assert f"# TYPE {metric.prometheus_name} {metric.kind}" in lines
    del kept


def test_kinds_follow_the_moves_of_their_tensors(session: Session) -> None:
    parts = {kind: (Part("host", cxl_offload.Bind((0,))),) for kind in ("kv", "weights")}
    store = TierStore(MemorySource(session), parts, pin=False)
    tensor = store.empty("kv", 0, (8 * MIB,), torch.uint8, pin=False)
    store.count(tensor, "kv", 0, tensor)
    with serve(0, session=session) as server:
        near = scrape(server)
        cxl_offload.move(tensor, "cxl", session=session)
        far = scrape(server)
        del tensor
        gone = scrape(server)
    assert of(near, "cxl_offload_kind_requested_bytes", kind="kv") == 8 * MIB
    assert of(near, "cxl_offload_kind_granted_bytes", kind="kv", node="0", tier="ldram") == 8 * MIB
    assert of(far, "cxl_offload_kind_granted_bytes", kind="kv", node="2", tier="cxl") == 8 * MIB
    assert not any("kind" in name for name, _ in gone)


def test_decisions_of_tuners_are_counted(session: Session) -> None:
    labels = {"framework": "test", "tuner": "endpoint", "outcome": "moved"}
    count_decision("test", "endpoint", "moved", nbytes=7)
    count_decision("test", "endpoint", "moved", count=0, nbytes=3)
    with serve(0, session=session) as server:
        found = scrape(server)
    assert of(found, "cxl_offload_tune_decisions_total", **labels) == 1
    assert of(found, "cxl_offload_tune_moved_bytes_total", **labels) == 10


def hazard() -> Hazard:
    return Hazard("movable-zone", "error", "so", "much", "fix", "there")


def test_findings_are_looked_for_once_a_minute() -> None:
    now, looked = [0.0], []

    def find() -> tuple[Hazard, ...]:
        looked.append(now[0])
        return (hazard(), hazard())

    reader = MetricsReader(Session.linux(), clock=lambda: now[0], find=find)
    for at in (0.0, 59.0, 61.0, 100.0):
        now[0] = at
        (sample,) = reader.read()["findings"]
        assert (sample.labels, sample.value) == (("movable-zone", "error"), 2)
    assert looked == [0.0, 61.0]


class AnswersLate(Session):
    """Its kernel takes as long to say what a node has free as the test wants."""

    asked: threading.Event
    may_answer: threading.Event

    def free_bytes(self, node: int, pages: Any = "base") -> int:
        self.asked.set()
        assert self.may_answer.wait(300)
        return super().free_bytes(node, pages)


def test_nobody_waits_for_a_scrape_whose_kernel_does_not_answer() -> None:
    session = AnswersLate.simulated(load_machine("epyc9354-cxl-a"))
    assert isinstance(session, AnswersLate)
    session.asked, session.may_answer = threading.Event(), threading.Event()
    parts = {"kv": (Part("host", cxl_offload.Bind((0,))),)}
    store = TierStore(MemorySource(session), parts, pin=False)
    reader = MetricsReader(session)
    scraping = threading.Thread(target=reader.read)
    scraping.start()
    assert session.asked.wait(300)

    def train() -> None:
        tensor = store.empty("kv", 0, (4 * MIB,), torch.uint8, pin=False)
        store.count(tensor, "kv", 0, tensor)
        cxl_offload.move(tensor, "cxl", session=session)
        count_decision("test", "waits", "kept")
        TierStore(MemorySource(session), parts, pin=False)
        session.stats()
        session.trim()

    training = threading.Thread(target=train, daemon=True)
    training.start()
    training.join(300)
    waited = training.is_alive()
    session.may_answer.set()
    scraping.join(300)
    assert not waited


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (lambda: ("127.0.0.1", 65536), "port 65536: a number from 0 to 65535"),
        (lambda: ("127.0.0.1", "9400"), "port '9400': a number"),
        (lambda: ("127.0.0.1", True), "port True: a number"),
        (lambda: ("", 0), "host '': a name or an address"),
        (lambda: ("256.256.256.256", 0), "no such host"),
        (lambda: ("x" * 300, 0), "no such host"),
        (lambda: ("a\0b", 0), "cannot listen on"),
        (lambda: ("two\nlines", 0), "cannot listen on"),
    ],
)
def test_address_that_cannot_be_listened_on_is_one_line(
    session: Session, address: Callable[[], tuple[str, int]], reason: str
) -> None:
    host, port = address()
    with pytest.raises(ConfigError) as refused:
        serve(port, host=host)
    assert reason in str(refused.value)
    assert str(refused.value).isprintable()


def test_taken_port_says_what_to_choose(session: Session) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="already in use; choose another port, or 0 for any"),
    ):
        serve(taken.getsockname()[1])


@pytest.mark.skipif(os.getuid() == 0, reason="root may listen on any port")
def test_privileged_port_says_what_to_choose(session: Session) -> None:
    with pytest.raises(ConfigError, match="ports below 1024 need root: choose a larger one"):
        serve(80)


def ask(server: MetricsServer, request: bytes) -> bytes:
    """What is answered to these bytes; empty: nothing, the connection was closed."""
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        connection.sendall(request)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                answer += part
        return answer


@pytest.mark.parametrize(
    "accepted",
    [
        "application/openmetrics-text; version=x",
        "application/openmetrics-text; version=1.0.0.0.0.9999999999999999999999",
        "text/plain; version=",
        "\x00;=;,;;=",
        "text/plain; version=1.x" * 500,
    ],
)
def test_header_that_cannot_be_read_is_answered_as_if_there_were_none(
    session: Session, accepted: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve(0) as server:
        answer = ask(server, f"GET /metrics HTTP/1.0\r\nAccept: {accepted}\r\n\r\n".encode())
    assert b"200 OK" in answer
    assert b"cxl_offload_info" in answer
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("request_", [b"\xff\xfe\r\n\r\n", b"GET\r\n\r\n", b"G" * 70000])
def test_request_that_is_none_says_nothing_in_the_program(
    session: Session, request_: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve(0) as server:
        ask(server, request_)
        assert scrape(server)
    assert capfd.readouterr() == ("", "")


def test_requests_that_do_not_end_leave_room_for_a_scrape(session: Session) -> None:
    with serve(0) as server, contextlib.ExitStack() as held:
        before = threading.active_count()
        for _ in range(3 * MOST_CONNECTIONS):
            connection = socket.create_connection((server.host, server.port), timeout=30)
            held.enter_context(connection)
            connection.sendall(b"GET /metr")
        assert scrape(server)
        deadline = time.monotonic() + 60  # threads of closed connections are ending
        while threading.active_count() - before > MOST_CONNECTIONS:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_connection_that_says_nothing_is_closed(
    session: Session, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cxl_offload.metrics.endpoint._Request.timeout", 0.05)
    with serve(0) as server:
        assert ask(server, b"GET /metr") == b""
    assert capfd.readouterr() == ("", "")


def test_metrics_that_cannot_be_read_are_a_line_of_log(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(reader: MetricsReader) -> None:
        raise OSError("the node is gone")

    with serve(0) as server:
        monkeypatch.setattr(MetricsReader, "read", fail)
        answer = ask(server, b"GET /metrics HTTP/1.0\r\n\r\n")
    assert b"500 Internal" in answer
    assert b"the log of the process says why" in answer
    assert "a scrape was not answered: OSError: the node is gone" in caplog.text


def test_local_rank_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(ConfigError, match="LOCAL_RANK is 'x', which is no number"):
        serve_at("0")


def test_closing_frees_the_port_and_can_be_repeated(session: Session) -> None:
    server = serve(0)
    port = server.port
    server.close()
    server.close()
    with serve(port) as again:
        assert again.url == f"http://127.0.0.1:{port}/metrics"


def test_forked_child_reads_nothing_and_does_not_keep_the_port(session: Session) -> None:
    collector, server = PrometheusCollector(session), serve(0)
    port = server.port

    def child() -> None:
        assert list(collector.collect()) == []
        server.close()
        parent_closed.wait()
        with serve(port):  # not held by the socket that this child inherited
            pass

    class ParentClosed:
        def __init__(self) -> None:
            self.reader, self.writer = os.pipe()

        def wait(self) -> None:
            os.close(self.writer)
            os.read(self.reader, 1)

    parent_closed = ParentClosed()
    closing = threading.Timer(0.2, lambda: (server.close(), os.close(parent_closed.writer)))
    closing.start()
    run_in_child(child)
    closing.join()
    os.close(parent_closed.reader)


def test_missing_prometheus_client_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="not installed; pip install prometheus-client"):
        serve(0)


def test_health_check_is_answered_without_a_page(session: Session) -> None:
    with serve(0) as server:
        answer = ask(server, b"HEAD /metrics HTTP/1.0\r\n\r\n")
    assert b"200 OK" in answer
    assert b"cxl_offload" not in answer


def test_address_of_another_machine_is_named_as_one(session: Session) -> None:
    with pytest.raises(ConfigError, match=r"no address of this machine; 127\.0\.0\.1 is"):
        serve(0, host="192.0.2.1")
