"""The text that Prometheus reads."""

import re

from bbalpha.serve.metrics import Histogram, Metrics

LINE = re.compile(r'^[a-z_]+(\{[a-z_]+="(\\.|[^"\\])*"(,[a-z_]+="(\\.|[^"\\])*")*\})? -?[0-9.e+-]+$')


def test_a_histogram_counts_what_is_up_to_each_bound():
    histogram = Histogram((1, 5))
    for value in (0.5, 1, 3, 7):
        histogram.add(value)
    assert histogram.lines("x", 'a="b"') == [
        'x_bucket{a="b",le="1"} 2', 'x_bucket{a="b",le="5"} 3', 'x_bucket{a="b",le="+Inf"} 4',
        'x_sum{a="b"} 11.5', 'x_count{a="b"} 4',
    ]  # fmt: skip


def test_every_line_can_be_read_whatever_models_are_called():
    metrics, odd = Metrics(), 'a"b\\c\nd'
    metrics.request("/predict", 200, seconds=0.1)
    metrics.request("/predict", 422, seconds=0.2)
    metrics.batch(odd, requests=3, rows=40)
    text = metrics.text({"bbalpha_queue_length": {odd: 2}, "bbalpha_under_way": 1})
    lines = text.splitlines()
    assert text.endswith("\n")
    assert all(line.startswith(("# HELP ", "# TYPE ")) or LINE.match(line) for line in lines)
    assert 'bbalpha_requests_total{route="/predict",status="422"} 1' in lines
    assert r'bbalpha_rows_total{model="a\"b\\c\nd"} 40' in lines
    assert 'bbalpha_request_seconds_count{route="/predict"} 2' in lines
    assert "bbalpha_under_way 1" in lines
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))
