"""A slow recogniser for rules over bytes, to check the automaton and the front ends against (Earley 1970).

An item is (expression, dot, origin): of an expression that began at byte `origin`, the first `dot` parts have matched; of a repeat, `dot`
turns (no more of them are counted than its bounds need). All items that hold before a byte are a column. An item waits in the column
where its next part begins until that is complete; what completes without a byte is remembered, for those who come to wait later
(Aycock and Horspool 2002). So left recursion, empty rules and ambiguity need no care, and a repeat is never unrolled.
"""

from nano_sgl.rules import BYTES, EMPTY, But, Byte, Cat, Expr, Or, Ref, Repeat, Rules


class Column:
    """The items that hold before one byte, and those that wait for an expression that begins here."""

    def __init__(self):
        self.items: set[tuple[int, int, int]] = set()
        self.fresh: list[tuple[int, int, int]] = []
        self.waiting: dict[int, set[tuple[int, int, int]]] = {}
        self.empty: set[int] = set()

    def put(self, item: tuple[int, int, int]) -> None:
        if item not in self.items:
            self.items.add(item)
            self.fresh.append(item)


def opened(expr: But) -> Or:
    """The same by what comes first: nothing, an item that no word begins with, or the first byte of some words."""
    tails: dict[int, list[bytes]] = {}
    for word in expr.words:
        if word:
            tails.setdefault(word[0], []).append(word[1:])
    rest, mask = Repeat(expr.item, 0, None), sum(1 << head for head in tails)
    items = [Byte(item.mask & ~mask) if isinstance(item, Byte) else item for item in (expr.item.parts if isinstance(expr.item, Or) else (expr.item,))]
    return Or((*[EMPTY] * (b"" not in expr.words), *(Cat((item, rest)) for item in items if item != Byte(0)),
               *(Cat((BYTES[head], But(expr.item, tuple(some)))) for head, some in tails.items())))


class Recogniser:
    """Feeds bytes to rules one by one. Expressions are known by number."""

    def __init__(self, rules: Rules):
        self.rules, self.exprs = rules.rules, []
        self.numbers: dict[int, int] = {}
        self.columns = [Column()]
        self.top = self.number(Ref(rules.start))
        self.columns[0].put((self.top, 0, 0))
        self.close()

    def number(self, expr: Expr) -> int:
        """An expression's number, by identity: `exprs` keeps it alive."""
        if id(expr) not in self.numbers:
            self.numbers[id(expr)] = len(self.exprs)
            self.exprs.append(expr)
        return self.numbers[id(expr)]

    def close(self, byte: int | None = None) -> None:
        """All items of the last column; those that go past the byte stand in the next."""
        here = len(self.columns) - 1
        column, past = self.columns[-1], Column()
        while column.fresh:
            item = column.fresh.pop()
            number, dot, origin = item
            expr = self.exprs[number]
            if self.complete(expr, dot):
                self.finish(number, origin, here)
            for part in self.wanted(expr, dot):
                if isinstance(part, Byte):
                    continue
                wanted = self.number(part)
                column.waiting.setdefault(wanted, set()).add(item)
                column.put((wanted, 0, here))
                if wanted in column.empty:
                    self.advance(item, here, here)
        if byte is not None:
            self.columns.append(past)
            for number, dot, origin in column.items:
                for part in self.wanted(self.exprs[number], dot):
                    if isinstance(part, Byte) and part.mask >> byte & 1:
                        self.advance((number, dot, origin), here, here + 1)

    def complete(self, expr: Expr, dot: int) -> bool:
        if isinstance(expr, Repeat):
            return dot >= expr.low
        return dot == (len(expr.parts) if isinstance(expr, Cat) else 1)

    def wanted(self, expr: Expr, dot: int) -> tuple[Expr, ...]:
        """What may come after the dot."""
        if isinstance(expr, Repeat):
            return (expr.item,) if expr.high is None or dot < expr.high else ()
        if isinstance(expr, Cat):
            return expr.parts[dot:dot + 1]
        if dot:
            return ()
        if isinstance(expr, But):
            return opened(expr).parts
        return expr.parts if isinstance(expr, Or) else (self.rules[expr.name],) if isinstance(expr, Ref) else (expr,)

    def advance(self, item: tuple[int, int, int], since: int, here: int) -> None:
        """The part an item waited for since one column is complete in another. An empty turn of a repeat can fill up the lower count alone."""
        number, dot, origin = item
        expr = self.exprs[number]
        if not isinstance(expr, Repeat):
            dot += 1
        elif since == here:
            dot = max(dot, expr.low)
        else:
            dot = min(dot + 1, expr.low) if expr.high is None else dot + 1
        self.columns[here].put((number, dot, origin))

    def finish(self, number: int, origin: int, here: int) -> None:
        """An expression that began at the origin is complete."""
        if origin == here:
            self.columns[here].empty.add(number)
        for item in list(self.columns[origin].waiting.get(number, ())):
            self.advance(item, origin, here)

    def feed(self, byte: int) -> bool:
        """One byte more; false: no text of the grammar goes on so, whatever follows."""
        self.close(byte)
        self.close()
        return bool(self.columns[-1].items)

    def accepted(self) -> bool:
        """Is what was fed so far a whole text of the grammar?"""
        return (self.top, 1, 0) in self.columns[-1].items


def accepts(rules: Rules, data: bytes) -> bool:
    """Is `data` one of the texts of a grammar?"""
    recogniser = Recogniser(rules)
    return all(recogniser.feed(byte) for byte in data) and recogniser.accepted()
