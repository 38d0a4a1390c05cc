"""What a cluster says of itself, in the program and from the command line."""

from __future__ import annotations

import json
import urllib.request

import numpy as np
import pytest
from parameter_servers import cluster

import mirrored
from mirrored import _cli
from mirrored._parameter_server._tally import Tally


def test_the_status_says_who_serves_and_who_runs_what(capsys):
    with cluster(workers=2, servers=2) as (strategy, coordinator):
        with strategy.scope():
            v = mirrored.Variable(np.zeros(512, "f"), name="weights")
            mirrored.EmbeddingTable(1000, 4, name="items")

        def closure():
            v.assign_add(np.ones(512, "f"))

        for _ in range(6):
            coordinator.schedule(closure)
        coordinator.join(60)
        status = coordinator.status()
        assert [server.bytes for server in status.servers] == [2048 + 8000, 8000]
        assert sum(server.updates for server in status.servers) == 6
        assert sum(worker.done for worker in status.workers) == status.done == 6
        assert status.servers[0].updates_a_second > 0
        text = str(status)
        assert "2 workers, 2 servers; 0 closures wait, 0 run, 6 done" in text
        assert "9.8 KiB" in text
        assert "items (500 rows), weights" in text
        assert mirrored.ClusterStatus.from_json(status.to_json()) == status

        address = coordinator.serve_status()
        assert address.startswith("127.0.0.1:")
        assert _cli.main(["status", address]) == 0
        assert "items (500 rows), weights" in capsys.readouterr().out
        with urllib.request.urlopen(f"http://{address}/", timeout=10) as answer:
            assert json.load(answer)["done"] == 6
        with pytest.raises(mirrored.ArgumentError, match="cannot listen"):
            coordinator.serve_status(int(address.rpartition(":")[2]))
        strategy.engine.kill_server(1)
        assert coordinator.status().servers[1] is None
        assert "does not answer" in str(coordinator.status())
    assert _cli.main(["status", address]) == 2
    assert "no status of parameter servers" in capsys.readouterr().err
    assert _cli.main(["status", "nowhere"]) == 2


def test_rates_are_those_of_the_last_seconds():
    now = [100.0]
    tally = Tally(lambda: now[0])
    for second in range(30):
        now[0] = 100.0 + second
        for _ in range(4):
            tally.updated()
    now[0] = 130.0
    assert tally.as_fields()["updates"] == 120
    assert tally.as_fields()["updates_a_second"] == pytest.approx(4.0, abs=0.5)
    now[0] = 200.0
    assert tally.as_fields()["updates_a_second"] == 0.0


def test_staleness_is_how_many_updates_came_in_between():
    tally = Tally()
    tally.told(1)
    tally.told(2)
    for lease in (1, 2):
        tally.came(lease)
        tally.updated()
    tally.told(1)
    tally.came(1)
    fields = tally.as_fields()
    assert (fields["staleness_mean"], fields["staleness_most"]) == (1 / 3, 1)
