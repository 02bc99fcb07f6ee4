"""Hand the units of a run to workers: first those of the model that the worker has loaded, longest first."""

from collections.abc import Sequence

from farspan.record import by_key

MOST_TRIES = 4  # of a unit whose worker dies: more would repeat a crash for ever


class UnitQueue:
    """The units of a run that wait, and those that workers measure. `done` counts the unit of a worker as done.

    Args:
        models: the model that each unit needs.
        flops: the cost of each unit.
    """

    def __init__(self, models: Sequence[str], flops: Sequence[float]) -> None:
        self._models, self._flops = models, flops
        order = sorted(range(len(models)), key=lambda number: (flops[number], -number))
        self._waiting = by_key((models[number], number) for number in order)  # units by model, the longest last
        self._held: dict[int, int] = {}  # by worker
        self._loaded: dict[int, str] = {}  # by worker: the model that it holds
        self._tries = [0] * len(models)
        self.num_done = 0

    @property
    def left(self) -> int:
        """The number of units that are not done."""
        return len(self._models) - self.num_done

    def take(self, worker: int) -> int | None:
        """Return the number of the unit that a worker should measure next; None if none waits."""
        model = self._loaded.get(worker, "")
        if not self._waiting.get(model):
            loads = {one: sum(self._flops[unit] for unit in units) for one, units in self._waiting.items() if units}
            if not loads:
                return None
            holders = [self._loaded[one] for one in self._loaded if one != worker]
            # the model with the most work for each worker that would share it
            model = max(loads, key=lambda one: loads[one] / (1 + holders.count(one)))
        unit = self._waiting[model].pop()
        self._loaded[worker], self._held[worker] = model, unit
        self._tries[unit] += 1
        return unit

    def done(self, worker: int) -> None:
        """Count the unit of a worker as done."""
        del self._held[worker]
        self.num_done += 1

    def lost(self, worker: int) -> int | None:
        """Forget a worker that died. Its unit waits again, before all others of its model; return that unit, if any.

        Raises:
            ValueError: too many workers died on the unit.
        """
        self._loaded.pop(worker, None)
        unit = self._held.pop(worker, None)
        if unit is None:
            return None
        if self._tries[unit] >= MOST_TRIES:
            raise ValueError(
                f"{MOST_TRIES} workers have died while they measured the same part of {self._models[unit]}: the device "
                "may lack the memory that it needs. Repeat the command with a smaller --batch or --chunk"
            )
        self._waiting[self._models[unit]].append(unit)
        return unit

    def tried(self, unit: int) -> bool:
        """Return whether the unit was handed out more than once."""
        return self._tries[unit] > 1
