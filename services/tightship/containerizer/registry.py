"""The containers there are, in memory: by id, by name with their tree, and by request id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tightship.containerizer import names

if TYPE_CHECKING:
    from tightship.containerizer.operations import Operation


class Registry:
    """Changed on the event loop alone; `is_living` is also asked by worker threads."""

    def __init__(self) -> None:
        self.by_id: dict[str, Operation] = {}
        self.added = 0
        self.removed = 0
        """How many since the start."""
        self._by_name: dict[str, Operation] = {}
        self._by_request: dict[str, Operation] = {}
        self._children: dict[str, set[str]] = {}
        self._fresh: list[str] = []
        self._leaving: list[Operation] = []
        self.made: dict[str, int] = {}
        """How many each client has made of what lives; those of the main door aren't counted."""

    def __len__(self) -> int:
        self.finish()
        return len(self.by_id)

    def add(self, operation: Operation) -> None:
        row = operation.row
        assert row.name not in self._by_name and row.id not in self.by_id
        self.by_id[row.id] = operation
        self.added += 1
        self._fresh.append(row.id)
        self._by_name[row.name] = operation
        if row.request_id:
            self._by_request[row.request_id] = operation
        self._children.setdefault(names.parent(row.name), set()).add(row.name)
        if row.client:
            self.made[row.client] = self.made.get(row.client, 0) + 1

    def remove(self, operation: Operation) -> None:
        row = operation.row
        del self.by_id[row.id]
        self.removed += 1
        del self._by_name[row.name]
        if row.request_id and self._by_request.get(row.request_id) is operation:
            del self._by_request[row.request_id]
        parent = names.parent(row.name)
        siblings = self._children[parent]
        siblings.discard(row.name)
        if not siblings:
            del self._children[parent]
        if row.client:
            self.made[row.client] -= 1
            if not self.made[row.client]:
                del self.made[row.client]

    def leaves(self, operation: Operation) -> None:
        """It is gone, and told so; whoever looks for anything before it is forgotten has it forgotten first."""
        self._leaving.append(operation)

    def finish(self) -> None:
        """Forgets what has left."""
        leaving, self._leaving = self._leaving, []
        for operation in leaving:
            operation.finish()

    def named(self, name: str) -> Operation | None:
        self.finish()
        return self._by_name.get(name)

    def requested(self, request_id: str) -> Operation | None:
        self.finish()
        return self._by_request.get(request_id) if request_id else None

    def find(self, name_or_id: str) -> Operation | None:
        """A name starts with "/", an id never does."""
        self.finish()
        return self._by_name.get(name_or_id) if name_or_id.startswith("/") else self.by_id.get(name_or_id)

    def children(self, name: str) -> list[Operation]:
        """Directly below."""
        self.finish()
        return [self._by_name[each] for each in sorted(self._children.get(name, ()))]

    def below(self, name: str) -> list[Operation]:
        """At every depth below; parents before their children."""
        found = []
        todo = self.children(name)[::-1]
        while todo:
            child = todo.pop()
            found.append(child)
            todo += self.children(child.row.name)[::-1]
        return found

    def settle(self, older_than: int) -> None:
        """Has those settle that were added before (wall clock, ns) and still live."""
        fresh, self._fresh = self._fresh, []
        for identity in fresh:
            operation = self.by_id.get(identity)
            if operation is not None and (operation.row.created > older_than or not operation.settle()):
                self._fresh.append(identity)

    def is_living(self, identity: str) -> bool:
        return identity in self.by_id
