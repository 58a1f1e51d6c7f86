"""What the bytes of a picture file promise before anything is decoded: frames, canvas, tags.

`checked` walks the containers in which a few bytes can promise too much or hide a frame. It raises BadInput, or what
reading past the end raises if the bytes end too early.
"""

from __future__ import annotations

import struct

from guardpaint.errors import BadInput, TooLarge

PNG, GIF, JPEG = b"\x89PNG\r\n\x1a\n", (b"GIF87a", b"GIF89a"), b"\xff\xd8\xff"
TIFF = {b"II*\0": "<", b"MM\0*": ">", b"II+\0": "<", b"MM\0+": ">"}
"""First bytes of a TIFF → byte order; a plus sign in place of the star means BigTIFF."""
PNG_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"acTL", b"fcTL", b"fdAT", b"IDAT", b"eXIf", b"IEND")
"""The chunks that make the picture. Others may hold megabytes of compressed text, and are left out."""
START_OF_SCAN, MOST_SCANS = b"\xff\xda", 100
"""Scans of a JPEG. An ordinary progressive one has about ten; every further one costs a pass over the picture."""
MOST_VALUES = 2**17
"""Numbers in all tags of a TIFF together; a picture of 65,000 strips has this many."""
NUMBERS = {3: 2, 4: 4, 5: 8, 6: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""Tag types that Pillow turns into one Python object per value → bytes of one value."""
POINTERS = (330, 34665, 34853, 40965)
"""Tags that hold the position of a further directory: sub-images, EXIF, GPS, interoperability."""
ORIENTATION, TILE_WIDTH, TILE_LENGTH = 274, 322, 323


def checked(data: bytes, name: str, most_frames: int, largest_pixels: int) -> bytes:
    """The bytes to decode; raises if they promise too many frames, or if their structure is damaged."""
    if data.startswith(PNG):
        return png(data, name, most_frames)
    if data.startswith(GIF):
        gif(data, name, most_frames)
    elif data.startswith(JPEG):
        scans = data.count(START_OF_SCAN)
        if scans > MOST_SCANS:
            raise BadInput(f"{name}: {scans} scans; a JPEG may have {MOST_SCANS}")
    elif data[:4] in TIFF:
        tags(data, name, most_frames, largest_pixels)
    return data


def too_many(name: str, most: int) -> TooLarge:
    return TooLarge(f"{name}: more than {most} frames; every frame is audited, so send fewer")


def png(data: bytes, name: str, most_frames: int) -> bytes:
    """The file with the chunks that make its picture. Programs disagree on a count of frames that is wrong, so it is
    refused."""
    position, kinds, kept, declared = len(PNG), list[bytes](), [PNG], 0
    while not kinds or kinds[-1] != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        if end > len(data):
            raise EOFError("the file ends inside a chunk")
        if kind in PNG_CHUNKS:
            kinds.append(kind)
            kept.append(data[position:end])
        if kind == b"acTL":
            (declared,) = struct.unpack_from(">I", data, position + 8)
        position = end
    frames = kinds.count(b"fcTL")
    if frames != declared or kinds.count(b"acTL") > 1 or (b"acTL" in kinds) != (b"fcTL" in kinds):
        raise BadInput(f"{name}: the file declares {declared} frames and has {frames}")
    if frames > most_frames:
        raise too_many(name, most_frames)
    return b"".join(kept)


def gif(data: bytes, name: str, most_frames: int) -> tuple[int, tuple[int, int]]:
    """The number of frames and the size of the canvas, which grows with frames that lie partly outside of it."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position, frames = 13 + palette_bytes(flags), 0
    while data[position] != 0x3B:  # the trailer
        if data[position] == 0x2C:  # a frame
            x, y, columns, rows, flags = struct.unpack_from("<4HB", data, position + 1)
            width, height, frames = max(width, x + columns), max(height, y + rows), frames + 1
            if frames > most_frames:
                raise too_many(name, most_frames)
            position += 11 + palette_bytes(flags)
        elif data[position] == 0x21:  # an extension
            position += 2
        else:
            raise BadInput(f"{name}: damaged image (a GIF block of unknown kind {data[position]})")
        while data[position]:
            position += data[position] + 1
        position += 1
    return frames, (width, height)


def palette_bytes(flags: int) -> int:
    """Bytes of the colour table that a GIF's flags announce."""
    return 3 << (flags & 7) + 1 if flags & 128 else 0


def tags(data: bytes, name: str, most_frames: int, largest_pixels: int) -> None:
    """Raise if the directories of a TIFF hold more numbers, bytes, frames or larger tiles than a picture needs."""
    order, big = TIFF[data[:4]], data[2:3] == b"+" or data[3:4] == b"+"
    head, entry, link = (8, "HHQ8s", "Q") if big else (4, "HHL4s", "L")
    size = struct.calcsize("<" + entry)
    (first,) = struct.unpack_from(order + link, data, head)
    waiting, seen, values, frames = [(first, True)], set[int](), 0, 0
    while waiting:
        position, is_frame = waiting.pop()
        if position in seen or position == 0:
            continue
        seen.add(position)
        frames += is_frame
        if frames > most_frames or len(seen) > 4 * most_frames:
            raise too_many(name, most_frames)
        (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, position)
        position += 8 if big else 2
        sides, octets = {TILE_WIDTH: 0, TILE_LENGTH: 0}, 0
        if count * size > len(data):
            raise EOFError("the file ends inside a directory")
        for start in range(position, position + count * size, size):
            tag, kind, many, payload = struct.unpack_from(order + entry, data, start)
            values, octets = values + (many if kind in NUMBERS else 0), octets + many * NUMBERS.get(kind, 1)
            if values > MOST_VALUES or octets > len(data):
                raise BadInput(f"{name}: its tags hold {values} numbers and {octets} bytes, too much for a picture")
            number = struct.unpack(order + ("H" if kind == 3 else link), payload[: 2 if kind == 3 else len(payload)])[0]
            if tag in POINTERS:
                waiting += [(p, False) for p in pointers(data, number, many, order + link)]
            if tag in sides:
                sides[tag] = number
        if sides[TILE_WIDTH] * sides[TILE_LENGTH] > largest_pixels:
            raise TooLarge(f"{name}: tiles of {sides[TILE_WIDTH]}×{sides[TILE_LENGTH]} pixels")
        (following,) = struct.unpack_from(order + link, data, position + count * size)
        waiting.append((following, is_frame))


def pointers(data: bytes, number: int, many: int, form: str) -> list[int]:
    """The positions in a tag that points to directories: one in the tag itself, several elsewhere in the file."""
    if many <= 1:
        return [number]
    return list(struct.unpack_from(f"{form[0]}{many}{form[1]}", data, number))


def orientation(exif: bytes) -> int:
    """The orientation in an EXIF block, 1 to 8; 1 if there is none or the block is damaged."""
    block = exif.removeprefix(b"Exif\0\0").removeprefix(b"Exif\0\0")
    try:
        order = TIFF[block[:4]]
        (position,) = struct.unpack_from(order + "L", block, 4)
        (count,) = struct.unpack_from(order + "H", block, position)
        for start in range(position + 2, position + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHLH", block, start)
            if tag == ORIENTATION and kind == 3:
                return int(value) if 1 <= value <= 8 else 1
    except (KeyError, struct.error):
        return 1
    return 1
