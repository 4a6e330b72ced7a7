"""The report of a run, from the text of a Prometheus endpoint. Needs no vLLM."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.vllm.serving_report import (
    parse_metrics,
    read_metrics,
    serving_report,
)

# As vLLM 0.32 prints it, shortened; the counters of tiers are this package's.
TEXT = """
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="bench"} 1000.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 300.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 200.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 500.0
vllm:generation_tokens_total{engine="0",model_name="bench"} 80.0
vllm:generation_tokens_created{engine="0",model_name="bench"} 1.0e+03
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="bench"} 4.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="bench"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="bench"} 2.0
vllm:kv_offload_store_bytes_total{engine="0",model_name="bench"} 4096.0
vllm:kv_offload_load_bytes_total{engine="0",model_name="bench"} 2048.0
vllm:cxl_offload_kv_stored_chunks_total{engine="0",model_name="bench",tier="hot"} 4.0
vllm:cxl_offload_kv_loaded_chunks_total{engine="0",model_name="bench",tier="hot"} 2.0
vllm:cxl_offload_kv_stored_chunks_total{engine="0",model_name="bench",tier="cold"} 1.0
odd line
"""


def test_report_since_the_start_has_rates_and_bytes_of_tiers() -> None:
    report = serving_report(parse_metrics(TEXT, read_at_s=1010.0))
    assert report.hit_rate == 0.7
    assert report.host_hit_rate == 0.5
    assert report.seconds == 10.0
    assert report.generated_per_s == 8.0
    assert report.first_token_s == 0.5
    assert report.tier_bytes == {
        "hot": {"stored": 4096.0, "loaded": 2048.0},
        "cold": {"stored": 1024.0},
    }


def test_chunks_that_came_back_to_the_first_tier_do_not_change_their_size() -> None:
    promoted = TEXT.replace('tier="hot"} 4.0', 'tier="hot"} 7.0')
    promoted += 'vllm:cxl_offload_kv_loaded_chunks_total{engine="0",tier="cold"} 3.0\n'
    found = serving_report(parse_metrics(promoted)).tier_bytes
    assert found["hot"]["stored"] == 7 * 1024.0
    assert found["cold"] == {"stored": 1024.0, "loaded": 3 * 1024.0}


def test_bytes_of_a_chunk_are_what_the_tiers_say_where_they_do() -> None:
    gauge = 'vllm:cxl_offload_kv_chunk_bytes{engine="%d",tier="%s"} 512.0\n'
    text = TEXT + "".join(gauge % (engine, tier) for engine in (0, 1) for tier in ("hot", "cold"))
    report = serving_report(parse_metrics(text, read_at_s=1010.0))
    assert report.tier_bytes["hot"] == {"stored": 2048.0, "loaded": 1024.0}


def test_report_between_readings_counts_only_what_came_between() -> None:
    begin = parse_metrics(TEXT, read_at_s=100.0)
    later = TEXT.replace("} 1000.0", "} 1500.0").replace("} 80.0", "} 100.0")
    later = later.replace('external_kv_transfer"} 500.0', 'external_kv_transfer"} 900.0')
    report = serving_report(parse_metrics(later, read_at_s=104.0), begin)
    assert (report.prompt_tokens, report.hit_rate) == (500.0, 0.8)
    assert report.generated_per_s == 5.0
    assert report.requests == 0
    assert math.isnan(report.first_token_s)
    assert report.tiers["hot"] == {"stored": 0.0, "loaded": 0.0}


def test_server_without_requests_has_no_rates() -> None:
    report = serving_report(parse_metrics("vllm:num_requests_running 0.0"))
    assert (report.hit_rate, report.generated_tokens, report.tier_bytes) == (0.0, 0.0, {})


class Endpoint(BaseHTTPRequestHandler):
    text = TEXT

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(self.text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Endpoint) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def test_command_prints_the_report_of_a_server(server: str) -> None:
    made = CliRunner().invoke(app, ["vllm-report", server])
    assert made.exit_code == 0, made.output
    assert "70.0%" in made.output
    assert "cold" in made.output
    found = json.loads(CliRunner().invoke(app, ["vllm-report", "--json", server]).output)
    assert found["hit_rate"] == 0.7
    assert found["tier_bytes"]["hot"]["stored"] == 4096.0


def test_command_that_watches_counts_from_its_start(server: str) -> None:
    arguments = ["vllm-report", "--json", "--seconds", "0.1", f"http://{server}/metrics"]
    found = json.loads(CliRunner().invoke(app, arguments).output)
    assert found["prompt_tokens"] == 0
    assert found["first_token_s"] is None
    assert found["seconds"] >= 0.1


def test_address_that_is_not_vllm_is_refused_in_one_line(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endpoint, "text", "up 1.0\n")
    with pytest.raises(ConfigError, match="has no metric of vLLM's"):
        read_metrics(server)
    with pytest.raises(ConfigError, match="Connection refused"):
        read_metrics("127.0.0.1:9")
    with pytest.raises(ConfigError, match="must be the address of a server"):
        read_metrics("file:///etc/passwd")
    with pytest.raises(ConfigError, match="control characters"):
        read_metrics("1024 TiB")


@pytest.mark.parametrize("number", ["NaN", "+Inf", "-Inf", "1e999"])
def test_series_without_a_number_is_skipped(number: str) -> None:
    odd = TEXT.replace("4096.0", number).replace('tier="hot"} 4.0', f'tier="hot"}} {number}')
    report = serving_report(parse_metrics(odd))
    assert report.stored_bytes == 0
    assert all(math.isfinite(n) for tier in report.tier_bytes.values() for n in tier.values())


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e300", "1e9"])
def test_wait_without_an_end_is_refused_in_one_line(seconds: str) -> None:
    done = CliRunner().invoke(app, ["vllm-report", "http://127.0.0.1:1", "--seconds", seconds])
    assert done.exit_code == 2
    (line,) = done.stderr.strip().splitlines()
    assert "--seconds" in line
