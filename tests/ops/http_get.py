"""Requests to the pages of an agent, and the metrics among them as numbers."""

from __future__ import annotations

import http.client
import socket

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 10.0
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def get(endpoint: str, path: str) -> tuple[int, str]:
    """Status and text of a page."""
    host, _, port = endpoint.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def raw(endpoint: str, request: bytes) -> bytes:
    """All that is answered to these bytes, until the other end hangs up."""
    host, _, port = endpoint.rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        connection.sendall(request)
        while received := connection.recv(65536):
            answer += received
    return answer


class Scrape:
    """The metrics of an agent at one moment: `scrape("kvxfer_slots", state="free")`."""

    def __init__(self, endpoint: str) -> None:
        status, self.text = get(endpoint, "/metrics")
        assert status == 200, self.text
        self.families = list(text_string_to_metric_families(self.text))
        self.samples: Samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }

    def __call__(self, name: str, side: str, **labels: str) -> float:
        return self.samples[name, frozenset({"side": side, **labels}.items())]
