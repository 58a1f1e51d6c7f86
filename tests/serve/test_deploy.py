"""Deployment files: they parse, name files that exist, and ask Prometheus for metrics the service has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from guardpaint.serve.metrics import Metrics
from guardpaint.serve.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_compose_mounts_what_is_there():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source
    assert (DEPLOY / "../deploy/Dockerfile").exists()
    assert all(":" in s["image"] and "latest" not in s["image"] for s in compose["services"].values() if "image" in s)


def test_the_dashboard_asks_for_metrics_that_exist():
    metrics = Metrics(lambda: 0.0)
    metrics.stages.labels("audit").observe(1)
    metrics.requests.labels("/", "200").observe(1)
    for counter in (metrics.pictures, metrics.triggers):
        counter.labels("x").inc()
    have = set(re.findall(r"^(guardpaint_\w+)", metrics.text().decode(), re.M))
    board = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    asked = {m for p in board["panels"] for t in p["targets"] for m in re.findall(r"guardpaint_\w+", t["expr"])}
    assert asked <= have, asked - have


def test_the_container_installs_the_package_of_the_base_it_serves():
    text = (DEPLOY / "Dockerfile").read_text()
    copied = {line.split()[1] for line in text.splitlines() if line.startswith("COPY")}
    assert '"--base", "mini-sd"' in text and "packages/paperdolls" in copied and "./packages/paperdolls" in text
    assert all((DEPLOY.parent / name).exists() for name in ("src", "constraints.txt", "packages/paperdolls"))


def test_commands_in_the_files_are_known():
    from typer.testing import CliRunner

    from guardpaint.cli.main import app

    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["serve", "--help"]).output
    for name in ("Dockerfile", "guardpaint.service"):
        text = (DEPLOY / name).read_text().split("guardpaint", 1)[1]
        used = set(re.findall(r"--(?:host|port|keys|audit-log|key-file|anchor|base)\b", text))
        assert used and all(option in shown for option in used)


def test_prometheus_and_datasource_agree():
    board = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    source = yaml.safe_load((DEPLOY / "grafana/datasource.yaml").read_text())["datasources"][0]
    assert {p["datasource"]["uid"] for p in board["panels"]} == {source["uid"]}
    scrape = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == ["guardpaint:8000"]


def test_prometheus_passes_the_key_of_metrics():
    scrape = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"][0]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    folder, name = scrape["authorization"]["credentials_file"].rsplit("/", 1)
    assert scrape["authorization"]["type"] == "Bearer" and folder == "/run/secrets"
    assert name in compose["services"]["prometheus"]["secrets"] and name in compose["secrets"]


def test_the_proxy_agrees_with_the_service():
    text, limits = (DEPLOY / "nginx.conf").read_text(), Settings()
    assert f"client_max_body_size {limits.largest_body >> 20}m;" in text
    assert f"client_header_timeout {limits.header_time:g}s;" in text
    assert f"client_body_timeout {limits.slow_client:g}s;" in text
    assert int(re.search(r"proxy_read_timeout (\d+)s", text)[1]) > limits.timeout
    assert text.count("{") == text.count("}") and "proxy_buffering off" in text
