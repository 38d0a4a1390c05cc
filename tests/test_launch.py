"""The launcher, with programs that use nothing of JAX: what it starts, passes on and ends."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

import mirrored
from mirrored import _cli
from mirrored.launch import Settings, launch


def run(program, *arguments, **options):
    return launch(Settings(["-c", program, *map(str, arguments)], **options))


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_names_addresses_prefixes_and_logs(tmp_path, capfd):
    program = (
        "import os, sys; e = os.environ;"
        "print(e['MIRRORED_PROCESS_ID'], e['MIRRORED_PROCESS_COUNT'], e['MIRRORED_COORDINATOR'],"
        " sys.argv[1:]); print('no newline', end='', file=sys.stderr)"
    )
    options = {"processes": 2, "log_directory": str(tmp_path), "show": [1]}
    assert run(program, "--lr", 1, **options) == 0
    logs = [(tmp_path / "attempt-0" / f"worker-{number}.out").read_text() for number in (0, 1)]
    first, second = (line.split(maxsplit=3) for line in logs)
    assert (first[:2], second[:2]) == (["0", "2"], ["1", "2"])
    assert first[2] == second[2]
    assert first[3] == "['--lr', '1']\n"
    out, err = capfd.readouterr()
    assert out == f"[worker 1] {logs[1]}"
    assert err == "[worker 1] no newline\n"


def test_the_second_machine_of_two_numbers_its_workers_after_the_first(capfd):
    program = (
        "import os; print(os.environ['MIRRORED_PROCESS_ID'], os.environ['MIRRORED_COORDINATOR'])"
    )
    assert run(program, processes=2, nodes=2, node_rank=1, coordinator="far:1234") == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[worker 2] 2 far:1234",
        "[worker 3] 3 far:1234",
    ]


def test_first_failure_is_told_with_its_words_and_its_code(capfd):
    program = (
        "import os, sys, time\n"
        "if os.environ['MIRRORED_PROCESS_ID'] == '1': time.sleep(0.2); sys.exit('lost my keys')\n"
        "time.sleep(60)"
    )
    assert run(program, processes=2) == 1
    said = capfd.readouterr().err.splitlines()
    assert said[-3].startswith("mirrored launch: worker 1 (host ")
    assert said[-3].endswith(
        "failed first, with exit code 1, before its first completed step; its last words:"
    )
    assert said[-2:] == ["  | lost my keys", "mirrored launch: ended the others that still ran: 0."]


def test_one_who_ends_because_of_another_is_not_the_first(capfd):
    program = (
        "import os, sys, time\n"
        "if os.environ['MIRRORED_PROCESS_ID'] == '1': time.sleep(0.3); sys.exit(7)\n"
        "sys.exit(86)"
    )
    assert run(program, processes=2) == 7
    assert "worker 1 (host " in capfd.readouterr().err.partition("mirrored launch: ")[2]


def test_one_who_ends_before_it_comes_is_not_waited_for(capfd):
    """Its exit code is 0, so nobody ends the others; they would wait for minutes."""
    program = (
        "import os, sys\n"
        "if os.environ['MIRRORED_PROCESS_ID'] == '{}': sys.exit()\n"
        "from mirrored import _cluster, _rollcall\n"
        "_rollcall.gather(_cluster.resolve_cluster(None, 1), 600)"
    )
    for early in (0, 1):
        assert run(program.format(early), processes=3) == 1
        said = capfd.readouterr().err
        assert f"worker {early} of 3 came to the end of its program before it met" in said


def test_killed_by_a_signal(capfd):
    assert run("import os; os.kill(os.getpid(), 11)") == 128 + 11
    assert "was killed by SIGSEGV" in capfd.readouterr().err


def test_no_process_is_left_behind(tmp_path, capfd):
    """Neither the other workers nor what they have started."""
    program = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "name = sys.argv[1] + '/' + os.environ['MIRRORED_PROCESS_ID']\n"
        "open(name + '.part', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename(name + '.part', name)\n"
        "while len([n for n in os.listdir(sys.argv[1]) if '.' not in n]) < 2: time.sleep(0.01)\n"
        "if os.environ['MIRRORED_PROCESS_ID'] == '0': sys.exit(3)\n"
        "time.sleep(60)"
    )
    assert run(program, tmp_path, processes=2) == 3
    pids = [int(pid) for path in tmp_path.iterdir() for pid in path.read_text().split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in pids if is_alive(pid)] == []


def test_restarts_all_and_gives_up_after_the_last(tmp_path, capfd):
    program = (
        "import os, sys, time\n"
        "who, attempt = os.environ['MIRRORED_PROCESS_ID'], os.environ['MIRRORED_ATTEMPT']\n"
        "open(sys.argv[1] + f'/{attempt}-{who}', 'w').write(os.environ['MIRRORED_COORDINATOR'])\n"
        "sys.exit(int(sys.argv[2 + int(attempt)]) if who == '0' else 0)"
    )
    assert run(program, tmp_path, 5, 0, processes=2, max_restarts=3) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]
    assert "starting all workers again (1 of at most 3 restarts)" in capfd.readouterr().err
    options = {"processes": 2, "max_restarts": 1, "coordinator": "127.0.0.1:4000"}
    assert run(program, tmp_path, 5, 6, **options) == 6
    # Connections of the attempt before may linger: each has a port of its own.
    assert (tmp_path / "0-1").read_text() == "127.0.0.1:4000"
    assert (tmp_path / "1-1").read_text() == "127.0.0.1:4001"


WAITS = (
    "import os, signal, struct, sys, time\n"
    "def on(number, frame):\n"
    "    print('got', number, flush=True)\n"
    "    if number == signal.SIGTERM and sys.argv[1] == 'ends': sys.exit(0)\n"
    "for number in (signal.SIGTERM, signal.SIGUSR1): signal.signal(number, on)\n"
    "print('ready', flush=True)\n"
    "if sys.argv[1] == 'stuck':\n"
    "    e = os.environ\n"
    "    path = e['MIRRORED_RUN_DIRECTORY'] + '/progress-' + e['MIRRORED_PROCESS_ID']\n"
    "    open(path, 'wb').write(struct.pack('<qq', 17, 18))\n"
    "while True: time.sleep(0.05)"
)


@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("goes on", 128 + 9)])
def test_signals_are_passed_on(tmp_path, how, code):
    program = tmp_path / "program.py"
    program.write_text(WAITS)
    command = [sys.executable, "-m", "mirrored", "launch", "-n", "2", "--grace", "0.5"]
    # After a signal to the launcher nothing is started again.
    command += ["--max-restarts", "2", str(program), how]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        lines = [launcher.stdout.readline() for _ in range(2)]
        assert sorted(lines) == ["[worker 0] ready\n", "[worker 1] ready\n"]
        launcher.send_signal(signal.SIGUSR1)
        lines = [launcher.stdout.readline() for _ in range(2)]
        assert sorted(lines) == [f"[worker {n}] got {int(signal.SIGUSR1)}\n" for n in (0, 1)]
        launcher.send_signal(signal.SIGTERM)
        out, err = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
        launcher.communicate()
    assert sorted(out.splitlines()) == [f"[worker {n}] got 15" for n in (0, 1)]
    assert launcher.returncode == code
    assert "starting all workers again" not in err


def test_the_watchdog_ends_a_run_that_stands_still(capfd):
    began = time.monotonic()
    assert run(WAITS, "stuck", processes=2, watchdog=0.5) == 1
    assert time.monotonic() - began < 30
    said = capfd.readouterr().err
    assert "no worker has run anything for" in said
    assert "(last steps: worker 0: 17, worker 1: 17)" in said


def test_a_launcher_that_is_killed_leaves_no_worker(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    command = [sys.executable, "-m", "mirrored", "launch", str(program)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid = int(launcher.stdout.readline().removeprefix("[worker 0] "))
    launcher.kill()
    launcher.communicate()
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", __file__], "processes=0"),
        (["no_such_program.py"], "there is no /"),
        (["--no-python", "no-such-program"], "which no-such-program is not"),
        (["--nodes", "2", __file__], "coordinator=None"),
        (["--coordinator", "localhost", __file__], "coordinator='localhost'"),
        (["--nodes", "2", "--node-rank", "2", "--master-addr", "far", __file__], "node_rank=2"),
        (["--show-workers", "0,3", __file__], "show=[0, 3]"),
        (["--cpu-devices", "0", __file__], "cpu_devices=0"),
        (["--watchdog", "-1", __file__], "watchdog=-1.0"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(arguments, words, capsys):
    assert _cli.main(["launch", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "hint: " in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "many", "x.py"], "invalid"),
        (["-n", "gpu", "x.py"], "no GPU"),
        (["--no-such-option", "x.py"], "unrecognized"),
        ([], "program"),
    ],
)
def test_arguments_that_cannot_be_read(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(_cli, "local_gpu_count", lambda: 0)
    with pytest.raises(SystemExit) as caught:
        _cli.main(["launch", *arguments])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_torchruns_spelling(monkeypatch):
    seen = []
    monkeypatch.setattr(_cli, "launch", lambda settings: seen.append(settings) or 0)
    monkeypatch.setattr(_cli, "local_gpu_count", lambda: 4)
    given = "--standalone --nnodes=2 --nproc_per_node=gpu --node_rank=1 --max_restarts 3"
    given += " --master_addr 10.0.0.1 --master_port 1234 -m package.train --nodes 7"
    assert _cli.main(["launch", *given.split()]) == 0
    settings = seen[0]
    assert (settings.nodes, settings.processes, settings.node_rank) == (2, 4, 1)
    assert (settings.max_restarts, settings.coordinator) == (3, "10.0.0.1:1234")
    assert list(settings.command) == ["-m", "package.train", "--nodes", "7"]


def test_settings_are_checked_in_python_too():
    with pytest.raises(mirrored.ArgumentError, match="max_restarts=-1"):
        Settings([__file__], max_restarts=-1)
