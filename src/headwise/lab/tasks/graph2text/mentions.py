"""Mentions of entities in a text, found in time that grows with the words alone (Aho and Corasick 1975)."""

from collections.abc import Iterator, Sequence


def find_mentions(words: Sequence[str], entities: Sequence[Sequence[str]]) -> Iterator[str | int]:
    """Yield the words of a text, with the number of an entity in place of its words, the longest that fits.

    >>> list(find_mentions("we use beam search".split(), [["search"], ["beam", "search"]]))
    ['we', 'use', 1]
    """
    mentioned = _find_longest(words, entities)
    place = 0
    while place < len(words):
        number = mentioned[place]
        yield words[place] if number is None else number
        place += 1 if number is None else len(entities[number])


def _find_longest(words: Sequence[str], entities: Sequence[Sequence[str]]) -> list[int | None]:
    """Return for each word of a text the number of the longest entity that begins with it.

    The text is read from its end, and so are the entities: a node is the beginnings of entities read backward, and
    `shorter` leads to the longest of them that is a proper end of the node.
    """
    following: list[dict[str, int]] = [{}]
    longest: list[int | None] = [None]
    for number, entity in enumerate(entities):
        node = 0
        for word in reversed(entity):
            if word not in following[node]:
                following[node][word] = len(following)
                following.append({})
                longest.append(None)
            node = following[node][word]
        longest[node] = number
    shorter = [0] * len(following)

    def step(node: int, word: str) -> int:
        while node and word not in following[node]:
            node = shorter[node]
        return following[node].get(word, 0)

    waiting = list(following[0].values())
    for node in waiting:
        for word, child in following[node].items():
            shorter[child] = step(shorter[node], word)
            if longest[child] is None:
                longest[child] = longest[shorter[child]]
            waiting.append(child)
    node, found = 0, []
    for word in reversed(words):
        node = step(node, word)
        found.append(longest[node])
    return found[::-1]
