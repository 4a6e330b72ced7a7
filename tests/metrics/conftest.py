"""A simulated session, and a scrape of an endpoint as Prometheus makes one."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from cxl_offload import Session, load_machine, use
from cxl_offload.metrics import MetricsServer

Scraped = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def session() -> Iterator[Session]:
    with use(Session.simulated(load_machine("epyc9354-cxl-a"))) as made:
        yield made


def page(server: MetricsServer) -> str:
    with urllib.request.urlopen(server.url, timeout=30) as answer:
        return str(answer.read().decode())


def scrape(server: MetricsServer) -> Scraped:
    """Every sample by its name and labels."""
    families = text_string_to_metric_families(page(server))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def of(samples: Scraped, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]
