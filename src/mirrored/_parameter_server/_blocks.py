"""Blocks: memory that two processes of one host share, and packets that refer to it.

Owns the blocks one end of a connection has made and which of them are free, the blocks of
the other end that are mapped here, and when one is given back: when the last array that
lies in it is gone. So neither end copies what it receives. Memory is anonymous (memfd): it
has no name, and nothing is left behind whatever ends the processes.
"""

from __future__ import annotations

import collections
import fcntl
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Sequence
from typing import final

import numpy as np

from mirrored._parameter_server._channel import Fields
from mirrored._parameter_server._wire import Header, as_array, packed, parsed, raw, refused

# The block (0: none), its size if it is new, whether it is used once, where the header is
# (0: in the packet; otherwise one more than its place in the block), its length, and how many
# numbers of released blocks follow.
_PACKET = struct.Struct("<4sIQ?QII")
_MAGIC = b"mir1"
_RELEASED = struct.Struct("<I")
_MOST_RELEASED = 256
_MOST_BLOCKS = 1024
_MOST_INLINE = 32 << 10
MOST_PACKET_BYTES = 64 << 10
_SMALLEST = 64 << 10
# Larger ones are not kept: they hold memory, and making them costs little beside filling them.
_LARGEST_KEPT = 64 << 20
_ALIGNMENT = 64
# A block that could shrink would end the process that reads beyond its end.
# Systems without seals import this module, and then use another transport.
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


@final
class _Block:
    """Memory of this end."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.descriptor = os.memfd_create("mirrored", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self.content = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)

    def close(self) -> None:
        os.close(self.descriptor)


@final
class Packets:
    """One end of a connection on one host.

    Args:
      connection: a connected socket that keeps packets apart (SOCK_SEQPACKET).
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._numbers = 0
        self._blocks: dict[int, _Block] = {}
        self._free: list[_Block] = []
        self._theirs: dict[int, mmap.mmap] = {}
        # Of the other end's blocks; filled by whatever thread lets go of an array last.
        self._released: collections.deque[int] = collections.deque()

    # --- sending -----------------------------------------------------------------

    def send(self, number: int, word: str, fields: Fields, arrays: Sequence[np.ndarray]) -> None:
        """Sends a message; raises OSError if the other end is gone."""
        header = packed(number, word, fields, arrays)
        contents = [raw(array) for array in arrays]
        place = 0
        in_block = len(header) > _MOST_INLINE
        if in_block:
            contents.append(np.frombuffer(header, np.uint8))
        offsets, size = _laid_out([len(content) for content in contents])
        block, is_new = self._take(size) if size else (None, False)
        kept = block is not None and block.size <= _LARGEST_KEPT
        try:
            if block is not None:
                for offset, content in zip(offsets, contents, strict=True):
                    block.content[offset : offset + len(content)] = content
            if in_block:
                place = offsets[-1] + 1
            released = self._take_released()
            packet = _PACKET.pack(
                _MAGIC,
                block.number if block is not None else 0,
                block.size if block is not None and is_new else 0,
                not kept,
                place,
                len(header),
                len(released) // _RELEASED.size,
            )
            parts = [packet, released] if in_block else [packet, released, header]
            if block is not None and is_new:
                socket.send_fds(self.socket, [b"".join(parts)], [block.descriptor])
            else:
                self.socket.send(b"".join(parts))
        finally:
            if block is not None and not kept:
                # The other end has its own hold on it.
                block.close()
        if block is not None and kept:
            self._blocks[block.number] = block

    def _take(self, size: int) -> tuple[_Block, bool]:
        for index, block in enumerate(self._free):
            if size <= block.size:
                return self._free.pop(index), False
        self._numbers += 1
        rounded = _SMALLEST
        while rounded < size:
            rounded *= 2
        return _Block(self._numbers, rounded if rounded <= _LARGEST_KEPT else size), True

    def _take_released(self) -> bytes:
        found = []
        while self._released and len(found) < _MOST_RELEASED:
            found.append(_RELEASED.pack(self._released.popleft()))
        return b"".join(found)

    # --- receiving ---------------------------------------------------------------

    def receive(self) -> tuple[Header, list[np.ndarray]] | None:
        """Reads a message; None if the other end has closed.

        Raises ServerError for what is no message, OSError if the other end is gone.
        """
        content, descriptors, flags, _ = socket.recv_fds(self.socket, MOST_PACKET_BYTES, 4)
        try:
            if not content:
                return None
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise refused(
                    found="a packet that is too long", expected=f"{MOST_PACKET_BYTES} bytes at most"
                )
            return self._understood(content, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _understood(
        self, content: bytes, descriptors: Sequence[int]
    ) -> tuple[Header, list[np.ndarray]]:
        if len(content) < _PACKET.size or not content.startswith(_MAGIC):
            raise refused(
                found=f"a packet of {len(content)} bytes of another form", expected="a packet"
            )
        _, number, size, once, place, header_size, released = _PACKET.unpack_from(content)
        end = _PACKET.size + released * _RELEASED.size
        if len(content) < end:
            raise refused(found="a packet that ends early", expected="a whole packet")
        for (given_back,) in _RELEASED.iter_unpack(content[_PACKET.size : end]):
            block = self._blocks.pop(given_back, None)
            if block is not None:
                self._free.append(block)
        memory = self._memory(number, size, once, descriptors) if number else None
        if place:
            if memory is None or place - 1 + header_size > len(memory):
                raise refused(found="a header beyond the end of its block", expected="one inside")
            header = parsed(memory[place - 1 : place - 1 + header_size])
        else:
            header = parsed(content[end : end + header_size])
        if not header.arrays and memory is None:
            return header, []
        return header, self._arrays(header, number, memory, once=once)

    def _memory(self, number: int, size: int, once: bool, descriptors: Sequence[int]) -> mmap.mmap:
        if not size:
            memory = self._theirs.get(number)
            if memory is None:
                raise refused(
                    found=f"block {number}, which is not known", expected="a block sent before"
                )
            return memory
        if len(self._theirs) >= _MOST_BLOCKS:
            raise refused(
                found=f"more than {_MOST_BLOCKS} blocks", expected="blocks that are given back"
            )
        if len(descriptors) != 1:
            raise refused(found=f"{len(descriptors)} blocks in a packet", expected="one")
        seals = fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS)
        if seals & _SEALS != _SEALS or os.fstat(descriptors[0]).st_size != size:
            raise refused(
                found="a block that may shrink, or of another size",
                expected=f"{size} bytes, sealed",
            )
        memory = mmap.mmap(descriptors[0], size, prot=mmap.PROT_READ)
        if not once:
            self._theirs[number] = memory
        return memory

    def _arrays(
        self, header: Header, number: int, memory: mmap.mmap | None, *, once: bool
    ) -> list[np.ndarray]:
        offsets, size = _laid_out([described.byte_count for described in header.arrays])
        whole = np.empty(0, np.uint8) if memory is None else np.frombuffer(memory, np.uint8)
        if size > len(whole):
            raise refused(
                found=f"arrays of {size} bytes in a block of {len(whole)}",
                expected="a larger block",
            )
        if memory is not None and not once:
            # Arrays below hold on to `whole`, not to the memory: with the last of them, in
            # whatever hands it ends, the block is free.
            finalizer = weakref.finalize(whole, self._released.append, number)
            finalizer.atexit = False
        return [
            as_array(described, whole[offset : offset + described.byte_count])
            for described, offset in zip(header.arrays, offsets, strict=True)
        ]

    def close(self) -> None:
        """Closes the socket and lets go of all memory."""
        self.socket.close()
        for block in [*self._blocks.values(), *self._free]:
            block.close()
        self._blocks.clear()
        self._free.clear()
        self._theirs.clear()


def _laid_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where contents of these sizes lie in a block, the first at its beginning."""
    offsets: list[int] = []
    end = 0
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(start)
        end = start + size
    return offsets, end


def peer_user(connection: socket.socket) -> int:
    """The user who runs the other end, as the kernel knows him."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", credentials)[1]
