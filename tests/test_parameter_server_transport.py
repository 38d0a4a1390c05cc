"""What goes between processes: whole, refused if it is no message, and never unpickled."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import socket
import struct
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
import zmq

import mirrored
from mirrored._parameter_server import _blocks, _shared_memory, _zeromq
from mirrored._parameter_server._endpoint import Endpoint, Network, open_channel
from mirrored._parameter_server._engine import ServerSpec
from mirrored._parameter_server._server import Server
from mirrored._parameter_server._staleness import Staleness
from mirrored._parameter_server._transport import Keys, make_token
from mirrored._parameter_server._wire import packed, parsed


class Echo:
    """Answers with what it was asked, and counts."""

    def __init__(self):
        self.count = 0
        self.kept = []

    def handle(self, operation, fields, arrays):
        self.count += 1
        if operation == "keep":
            self.kept += arrays
            return {}, []
        if operation == "wait":
            time.sleep(fields["seconds"])
        if operation == "raise":
            raise mirrored.ArgumentError(fact="a", expected="b", hint="c")
        if operation == "break":
            return fields["absent"]
        return fields, arrays


def make_keys():
    return Keys(make_token(), *_zeromq.make_curve_keys(), *_zeromq.make_curve_keys())


# The ways there are: on one host, between processes that share no memory, and encrypted.
WAYS = {
    "shared memory": ("shared memory", "127.0.0.1"),
    "zeromq": ("zeromq", "127.0.0.1"),
    "encrypted": ("zeromq", "127.0.0.2"),
}


@contextlib.contextmanager
def serving(way, service=None, lock=None):
    transport, interface = WAYS[way]
    service = service or Echo()
    keys = make_keys()
    network = Network(keys, interface, transport)
    endpoint = Endpoint(service, lock or threading.Lock(), network, interface, "test")
    channel = open_channel(endpoint.address, "server 3", keys)
    try:
        yield service, channel, endpoint, keys
    finally:
        channel.close()
        endpoint.close()


@pytest.fixture(params=list(WAYS))
def way(request):
    return request.param


def arrays_of_all_kinds():
    return [
        np.arange(7, dtype="int64"),
        np.float32(3.5).reshape(()),
        np.zeros((0, 4), "float16"),
        np.arange(24, dtype="f").reshape(4, 6)[:, ::2],
        np.array([1.5, -2.0], ml_dtypes.bfloat16),
        np.array([1, -3], ml_dtypes.int4),
        np.array([[True], [False]]),
        np.array([1 + 2j]),
    ]


def test_messages_arrive_as_they_were(way):
    with serving(way) as (_, channel, _, _):
        sent = arrays_of_all_kinds()
        fields = {"a": [1, None, {"b": "ü"}], "c": 1.5}
        found, arrays = channel.request("echo", fields, sent, timeout=10)
        assert found == fields
        for before, after in zip(sent, arrays, strict=True):
            assert after.dtype == before.dtype
            np.testing.assert_array_equal(after, before)
        # More than a packet holds, in fields and in arrays.
        fields = {"many": list(range(20_000))}
        large = np.arange(3_000_000, dtype="int32")
        found, (array,) = channel.request("echo", fields, [large], timeout=10)
        assert found == fields
        np.testing.assert_array_equal(array, large)
        assert channel.request("echo", {}, timeout=10) == ({}, [])


def test_what_was_received_never_changes(way):
    """Memory is used again only when nobody has an array in it any more."""
    with serving(way) as (echo, channel, _, _):
        held = []
        for number in range(60):
            sent = np.full(30_000, number, "int32")
            channel.request("keep", {}, [sent], timeout=10)
            _, (array,) = channel.request("echo", {}, [sent], timeout=10)
            held.append(array)
        for number in range(60):
            assert set(np.unique(held[number])) == {number}
            assert set(np.unique(echo.kept[number])) == {number}


def test_memory_is_given_back():
    with serving("shared memory") as (_, channel, _, _):
        for _ in range(50):
            channel.request("echo", {}, [np.zeros(50_000)], timeout=10)
        packets = channel._own.connection._packets
        assert packets._numbers <= 3
        gc.collect()
        assert len(packets._theirs) <= 3
        # Too large to be kept: gone when the answer is.
        huge = np.zeros(_blocks._LARGEST_KEPT + 1, np.uint8)
        channel.request("keep", {}, [huge], timeout=10)
        assert all(block.size <= _blocks._LARGEST_KEPT for block in packets._free)


def test_several_messages_may_be_under_way(way):
    with serving(way) as (_, channel, _, _):
        futures = [
            channel.submit("echo", {"n": n}, [np.full(1000, n)], timeout=10) for n in range(20)
        ]
        for n in reversed(range(20)):
            fields, (array,) = futures[n].result(10)
            assert fields == {"n": n}
            assert set(array) == {n}


def test_any_number_of_threads_may_ask(way):
    with serving(way) as (_, channel, _, _):
        wrong = []

        def ask(number):
            for turn in range(30):
                sent = {"n": number * 1000 + turn}
                fields, (array,) = channel.request("echo", sent, [np.full(9, turn)], timeout=10)
                if fields != sent or set(array) != {turn}:
                    wrong.append(fields)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert wrong == []


def test_errors_cross_and_do_not_end_the_service(way):
    with serving(way) as (_, channel, _, _):
        with pytest.raises(mirrored.ArgumentError, match="hint: c"):
            channel.request("raise", {}, timeout=10)
        with pytest.raises(mirrored.ServerError, match="do not fit"):
            channel.request("break", {}, timeout=10)
        assert channel.request("echo", {"x": 1}, timeout=10)[0] == {"x": 1}


def test_a_silent_peer_is_named(way):
    with serving(way) as (_, channel, _, _):
        with pytest.raises(
            mirrored.ServerError, match=r"server 3 did not answer 'wait' within 0.2"
        ):
            channel.request("wait", {"seconds": 1.0}, timeout=0.2)
        # Its late answer is nobody's: the next question gets its own.
        assert channel.request("echo", {"x": 1}, timeout=10)[0] == {"x": 1}


def test_a_peer_that_ends_is_named_at_once(way):
    with serving(way) as (_, channel, endpoint, _):
        channel.request("echo", {}, timeout=10)
        endpoint.close()
        with pytest.raises(mirrored.ServerError, match="server 3 is gone"):
            for _ in range(1000):
                channel.request("echo", {}, timeout=10)
        assert channel.is_lost


@pytest.mark.parametrize("way", ["shared memory"])
def test_nobody_there_is_an_error_at_once(way):
    with serving(way) as (_, _, endpoint, keys):
        endpoint.close()
        time.sleep(0.1)
        channel = open_channel(endpoint.address, "server 4", keys)
        with pytest.raises(mirrored.ServerError, match="server 4 is gone"):
            channel.request("echo", {}, timeout=10)


# --- those who are not asked for ---------------------------------------------------------


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __reduce__(self):
        return os.putenv, ("MIRRORED_TEST_BOMB", "went off")


HEADERS = {
    "no JSON": b"\x80\x04garbage",
    "a pickle": pickle.dumps([1, "echo", {}, []]),
    "deep": b"[" * 100_000,
    "no list": b'{"number": 1}',
    "too short": b'[1, "echo"]',
    "number": json.dumps(["1", "echo", {}, []]).encode(),
    "negative": json.dumps([-1, "echo", {}, []]).encode(),
    "operation": json.dumps([1, 7, {}, []]).encode(),
    "fields": json.dumps([1, "echo", [], []]).encode(),
    "objects": json.dumps([1, "echo", {}, [["object", [1]]]]).encode(),
    "text": json.dumps([1, "echo", {}, [["<U4", [1]]]]).encode(),
    "shape": json.dumps([1, "echo", {}, [["float32", [-1]]]]).encode(),
    "shape of floats": json.dumps([1, "echo", {}, [["float32", [1.5]]]]).encode(),
    "huge": json.dumps([1, "echo", {}, [["float64", [1 << 39, 1 << 39]]]]).encode(),
    "absent": json.dumps([1, "echo", {}, [["float32", [1000]]]]).encode(),
}


@pytest.mark.parametrize("header", list(HEADERS))
def test_headers_that_are_none_are_refused(header):
    way = "shared memory"
    with serving(way) as (echo, channel, endpoint, keys):
        raw = introduced(endpoint, keys)
        content = HEADERS[header]
        if len(content) < _blocks._MOST_INLINE:
            raw.send(packet(header_size=len(content)) + content)
        else:
            with pytest.raises(mirrored.ServerError, match="refused"):
                parsed(content)
            raw.send(b"nothing")
        assert_refused(raw)
        assert echo.count == 0
        assert channel.request("echo", {"x": 1}, timeout=10)[0] == {"x": 1}


def introduced(endpoint, keys):
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    raw.settimeout(10)
    raw.connect("\0" + endpoint.address.local)
    raw.send(keys.token)
    return raw


def packet(block=0, size=0, once=False, place=0, header_size=0, released=0):
    return _blocks._PACKET.pack(b"mir1", block, size, once, place, header_size, released)


def assert_refused(raw):
    answer = raw.recv(1 << 16)
    assert b"was refused" in answer
    assert raw.recv(1 << 16) == b""
    raw.close()


@pytest.mark.parametrize("what", ["magic", "short", "released", "block", "beyond"])
def test_packets_that_are_none_are_refused(what):
    with serving("shared memory") as (echo, channel, endpoint, keys):
        raw = introduced(endpoint, keys)
        good = packed(1, "echo", {}, [])
        raw.send(
            {
                "magic": b"POST / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 3,
                "short": packet()[:-2],
                "released": packet(released=1 << 30),
                "block": packet(block=5, header_size=len(good)) + good,
                "beyond": packet(place=1 << 30, header_size=len(good)) + good,
            }[what]
        )
        assert_refused(raw)
        assert echo.count == 0
        assert channel.request("echo", {"x": 1}, timeout=10)[0] == {"x": 1}


@pytest.mark.parametrize("what", ["may shrink", "smaller", "two", "none"])
def test_memory_that_could_end_the_server_is_refused(what):
    """Reading beyond the end of a file that shrank is SIGBUS."""
    with serving("shared memory") as (echo, channel, endpoint, keys):
        raw = introduced(endpoint, keys)
        good = packed(1, "echo", {}, [np.zeros(4)])
        made = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(made, 4096)
        descriptors = {"none": [], "two": [made, made]}.get(what, [made])
        content = packet(block=1, size=8192 if what == "smaller" else 4096, header_size=len(good))
        if descriptors:
            socket.send_fds(raw, [content + good], descriptors)
        else:
            raw.send(content + good)
        assert_refused(raw)
        os.close(made)
        assert echo.count == 0
        assert channel.request("echo", {"x": 1}, timeout=10)[0] == {"x": 1}


def test_who_does_not_know_the_token_is_not_answered():
    with serving("shared memory") as (echo, channel, endpoint, keys):
        for token in (b"", b"x" * 32, keys.token[:-1], pickle.dumps(Bomb())):
            raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            raw.settimeout(10)
            raw.connect("\0" + endpoint.address.local)
            raw.send(token)
            assert raw.recv(1 << 16) == b""
            raw.close()
        # One that says nothing keeps nobody waiting, nor does one that leaves at once.
        idle = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        idle.connect("\0" + endpoint.address.local)
        assert channel.request("echo", {"x": 1}, timeout=10)[0] == {"x": 1}
        idle.close()
        assert channel.request("echo", {"x": 1}, timeout=10)[0] == {"x": 1}
        assert echo.count == 2
        stranger = open_channel(endpoint.address, "server 3", make_keys())
        with pytest.raises(mirrored.ServerError, match="server 3 is gone"):
            stranger.request("echo", {}, timeout=10)
        assert echo.count == 2


def dealer(address):
    made = zmq.Context.instance().socket(zmq.DEALER)
    made.linger = 0
    made.rcvtimeo = 10_000
    made.connect(address)
    return made


def test_zeromq_refuses_what_is_no_message():
    with serving("zeromq") as (echo, channel, endpoint, keys):
        address = endpoint.address.remote
        raw = dealer(address)
        good = packed(1, "echo", {}, [np.zeros(4, "f")])
        for frames in (
            [b"x" * 32, good, b"0" * 16],
            [good],
            [b""],
            [pickle.dumps(Bomb())],
        ):
            # Without the token: no word.
            raw.send_multipart(frames)
        for frames in (
            [good],
            [good, b"0" * 15],
            [good, b"0" * 16, b""],
            [packed(1, "echo", {}, []), pickle.dumps(Bomb())],
            *[[header] for header in HEADERS.values()],
        ):
            raw.send_multipart([keys.token, *frames])
            header = parsed(raw.recv_multipart()[0])
            assert header.word == "error"
            assert "was refused" in header.fields["fact"]
        # Nobody who speaks ZeroMQ at all.
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), 10) as plain:
            plain.send(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(1000))
        assert echo.count == 0
        assert channel.request("echo", {"x": 1}, timeout=10)[0] == {"x": 1}
        assert "MIRRORED_TEST_BOMB" not in os.environ
        raw.close()


def test_zeromq_refuses_messages_that_are_too_long():
    keys, echo = make_keys(), Echo()
    listener = _zeromq.ZeroMqListener(
        echo,
        threading.Lock(),
        keys,
        "test",
        interface="127.0.0.1",
        encrypted=False,
        most_bytes=1 << 20,
    )
    raw = dealer(listener.address)
    array = np.zeros(1 << 20)
    raw.send_multipart([keys.token, packed(1, "echo", {}, [array]), array])
    raw.rcvtimeo = 300
    with pytest.raises(zmq.Again):
        raw.recv()
    raw.close()
    connection = _zeromq.ZeroMqConnection("server 3", listener.address, keys, encrypted=False)
    answer = connection.ask("echo", {}, [np.zeros(8)], 10)
    assert answer.result(10)[0] == {}
    assert echo.count == 1
    connection.close()
    listener.close()


@pytest.mark.parametrize("who", ["plain", "other keys", "no keys of a client"])
def test_off_loopback_nobody_without_the_keys_gets_through(who):
    with serving("encrypted") as (echo, channel, endpoint, keys):
        assert endpoint.address.encrypted
        raw = zmq.Context.instance().socket(zmq.DEALER)
        raw.linger = 0
        raw.rcvtimeo = 400
        if who != "plain":
            # The server's public key is no secret; a key of one's own is not enough.
            raw.curve_serverkey = keys.server_public
            raw.curve_publickey, raw.curve_secretkey = zmq.curve_keypair()
        if who == "no keys of a client":
            raw.curve_publickey, raw.curve_secretkey = keys.server_public, keys.server_secret
        raw.connect(endpoint.address.remote)
        raw.send_multipart([keys.token, packed(1, "echo", {}, [])])
        with pytest.raises(zmq.Again):
            raw.recv()
        raw.close()
        assert echo.count == 0
        assert channel.request("echo", {"x": 1}, timeout=10)[0] == {"x": 1}


def test_what_is_sent_off_loopback_cannot_be_read():
    """A wire that is listened to: the bytes pass through, and the words are not among them."""
    with serving("encrypted") as (_, _, endpoint, keys):
        host, port = endpoint.address.remote.removeprefix("tcp://").split(":")
        seen = bytearray()
        tap = socket.create_server(("127.0.0.1", 0))

        def pass_on(source, target):
            with contextlib.suppress(OSError):
                while content := source.recv(1 << 16):
                    seen.extend(content)
                    target.sendall(content)

        def accept():
            client, _ = tap.accept()
            with client, socket.create_connection((host, int(port))) as server:
                back = threading.Thread(target=pass_on, args=(server, client), daemon=True)
                back.start()
                pass_on(client, server)
                server.shutdown(socket.SHUT_RDWR)
                back.join(10)

        listening = threading.Thread(target=accept, daemon=True)
        listening.start()
        address = f"tcp://127.0.0.1:{tap.getsockname()[1]}"
        connection = _zeromq.ZeroMqConnection("server 3", address, keys, encrypted=True)
        secret = np.frombuffer(b"these are the weights" * 100, np.uint8)
        fields, (array,) = connection.ask("echo", {"word": "swordfish"}, [secret], 10).result(10)
        assert fields == {"word": "swordfish"}
        np.testing.assert_array_equal(array, secret)
        assert len(seen) > 2 * len(secret)
        assert b"the weights" not in seen
        assert b"swordfish" not in seen
        assert keys.token not in seen
        connection.close()
        listening.join(10)
        tap.close()


def test_on_one_host_nothing_listens_on_the_network():
    with serving("shared memory") as (_, _, endpoint, _):
        assert endpoint.address.remote is None
    network = Network(make_keys())
    endpoint = Endpoint(Echo(), threading.Lock(), network, network.interface, "test")
    assert endpoint.address.remote is None
    assert endpoint.address.host == _shared_memory.host_name()
    endpoint.close()


def test_a_server_lives_through_questions_of_another_form(way):
    server = Server(ServerSpec(0, 1, Staleness()))
    with serving(way, server, server.lock) as (_, channel, _, _):
        piece = {"number": 1, "name": "v", "start": 0}
        channel.request("create", {"pieces": [piece]}, [np.ones(3, "f")], timeout=10)
        read = {"read": [[1]]}
        push = {"lease": 0, "closure": 0, "step": 0, "updates": [], "read": []}
        for operation, fields, arrays in (
            ("pull", {}, []),
            ("pull", {"read": 7}, []),
            ("pull", {"read": [[]]}, []),
            ("pull", {"read": [["1"]]}, []),
            ("pull", {"read": [[99]]}, []),
            ("push", {}, []),
            ("push", {**push, "updates": [{"kind": "add", "piece": 1}]}, []),
            ("push", {**push, "updates": [{"kind": "add", "piece": 1}]}, [np.ones(4, "f")]),
            ("push", {**push, "updates": [{"kind": "add", "piece": 1}]}, [np.ones(3, "d")]),
            ("push", {**push, "updates": [{"kind": "gradients", "optimizer": 9}]}, []),
            ("rows", {"tables": [1]}, [np.arange(3)]),
            ("create", {"pieces": [piece]}, []),
            ("__init__", {}, []),
            ("control", {}, []),
        ):
            with pytest.raises(mirrored.ServerError):
                channel.request(operation, fields, arrays, timeout=10)
        _, (value,) = channel.request("pull", read, timeout=10)
        assert value.tolist() == [1, 1, 1]


@pytest.mark.parametrize("missing", ["ray", "zmq"])
def test_without_the_extra_its_name_is_said(missing, monkeypatch):
    for name in list(sys.modules):
        if name.startswith("mirrored._parameter_server._ray"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(mirrored.MissingDependencyError, match=r"mirrored\[ray\]"):
        mirrored.ParameterServerStrategy(engine="ray")


def test_struct_of_packets_is_as_the_tests_say():
    """The tests above make packets themselves: another form would be refused for that alone."""
    assert _blocks._PACKET.size == struct.calcsize("<4sIQ?QII")
    with serving("shared memory") as (echo, _, endpoint, keys):
        raw = introduced(endpoint, keys)
        good = packed(1, "echo", {"x": 1}, [])
        raw.send(packet(header_size=len(good)) + good)
        assert b'{"x":1}' in raw.recv(1 << 16)
        assert echo.count == 1
        raw.close()
