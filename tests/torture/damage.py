"""Bytes that are not what was written: changed, taken out, doubled, cut off."""


def damaged(data, rng):
    """`data` with one to four wounds."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place, kind = rng.randrange(len(data) + 1), rng.random()
        if kind < 0.6 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind < 0.75:
            data[place : place + rng.randint(1, 8)] = b""
        elif kind < 0.9:
            data[place:place] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 8)))
        else:
            del data[place:]
    return bytes(data)
