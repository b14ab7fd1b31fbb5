"""Steps that run out of memory and are recovered, in every form, while Python has none."""

from __future__ import annotations

import gc
import warnings
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from typing import Any

from .body import Body, alive
from .fault import Outcome
from .fork import CALM, apart

LEFT = ("modes", "dictionaries", "hooks", "surroundings")


class Recovery(Body):
    """recovery_world.World's step in one of its forms; `part` is its call, or the backward
    of the loss that it returned."""

    def __init__(
        self,
        form: str,
        part: str = "call",
        phase: str = "backward",
        *,
        warm: bool = False,
        **options: Any,
    ) -> None:
        told = [form, part, phase, *(["warm"] if warm else []), *options]
        self.name = ", ".join(told)
        self.form, self.part, self.phase, self.warm = form, part, phase, warm
        self.options = options
        if not warm:  # nearly all of it is imports, and without any memory CPython hangs there
            self.rarer, self.total = 2, 60_000

    # --- in the stage ---

    def prepare(self) -> None:
        from helpers.recovery_world import Judge

        self.judged = Judge(self.form, **self.options)
        count = apart(self._count, CALM)
        assert not count.died, count.died
        self.nth = 1 + count.value // 2
        if self.warm:
            self._warm()
        self.world = self.judged.world()
        self.saved = self._save()
        if self.part == "back":
            self.loss = self._call()
            self.loss = self.loss.mean() if self.loss.ndim else self.loss
        self.before = self.world.state()
        self.world.begins = [self.before]
        self.known: dict[Any, Any] = {}
        gc.collect()
        gc.freeze()

    def _call(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return self.world.step(*self.world.batches[0])

    def _count(self) -> int:
        """Of a run without faults: how many allocations of torch the part makes."""
        from helpers.recovery_world import quiet

        from oomkit.testing import inject_oom

        world = self.judged.world()
        count = inject_oom(nth=2**60, phase=self.phase)
        with quiet():
            world.run(0, count, self.part)
        return count.seen

    def _warm(self) -> None:
        """Everything that a recovery imports and keeps for the process is there."""
        from helpers.recovery_world import quiet

        from oomkit.testing import inject_oom

        for part in self.judged.world().parts():
            with quiet():
                self.judged.world().run(0, inject_oom(nth=3), part)

    def _save(self) -> dict[str, Any]:
        import torch

        w = self.world
        return {
            "parameters": [p.detach().clone() for p in w.net.parameters()],
            "gradients": [None if p.grad is None else p.grad.clone() for p in w.net.parameters()],
            "buffers": [b.clone() for b in w.net.buffers()],
            "optimizer": deepcopy(w.opt.state_dict()),
            "scheduler": dict(w.sched.state_dict()),
            "counter": w.counter.save(),
            "random": torch.get_rng_state(),
        }

    # --- in the child ---

    def armed(self) -> AbstractContextManager[Any]:
        return self._armed()

    @contextmanager
    def _armed(self) -> Any:
        from oomkit.testing import inject_oom

        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", UserWarning)
            stack.enter_context(inject_oom(nth=self.nth, phase=self.phase))
            yield

    def call(self) -> Any:
        if self.part == "back":
            return self.loss.backward()
        return self.world.step(*self.world.batches[0])

    def after(self, outcome: Outcome, box: list[Any]) -> None:
        import torch

        import oomkit
        from oomkit import _C

        w, wrong = self.world, outcome.wrong
        result, error = box
        box.clear()
        if _C.phase_set(0) != 0:
            wrong.append("the phase is left behind")
        if oomkit.current().count != 1:
            wrong.append("current() is left behind")
        now = w.state()
        from helpers.recovery_world import differences

        for name in LEFT:
            wrong += differences(self.before[name], now[name], f"{name} left behind")
        kept: dict[str, Any] = {"plan": (), "state": now, "result": None}
        kept["changed"] = differences(self.before, now, "not as before")
        kept["committed"] = bool(getattr(error, "committed", False))
        finished = error is None
        if finished:
            kept["plan"] = w.plan()
        if finished and self.part == "call" and isinstance(result, torch.Tensor):
            kept["result"] = result.detach().numpy().copy()
            if w.second:  # its backward is the caller's, and has memory
                loss = result.mean() if result.ndim else result
                loss.backward()
                kept["state"] = w.state()
                del loss
        elif finished:
            kept["result"] = result
        del result, error
        self.loss = None
        self._restore()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                again = w.run(0)
        except BaseException as failed:
            wrong.append(f"the next call fails: {type(failed).__name__}: {failed}")
            outcome.values = kept
            return
        record = w.step.records[-1]
        kept["again"] = (w.plan(), again, w.state())
        w.net.zero_grad()
        # Not before: a failed backward leaves its graph with the thread until the next one.
        kept["alive"] = alive()
        if (record.batch_size, record.ooms, record.attempts) != (8, 0, 1):
            wrong.append(f"the next call's record: {record}")
        outcome.values = kept

    def _restore(self) -> None:
        """What the user's own program would put back before it goes on."""
        import torch

        w, saved = self.world, self.saved
        with torch.no_grad():
            for p, value in zip(w.net.parameters(), saved["parameters"], strict=True):
                p.copy_(value)
            for b, value in zip(w.net.buffers(), saved["buffers"], strict=True):
                b.copy_(value)
        for p, value in zip(w.net.parameters(), saved["gradients"], strict=True):
            p.grad = None if value is None else value.clone()
        w.opt.load_state_dict(deepcopy(saved["optimizer"]))
        w.sched.load_state_dict(saved["scheduler"])
        w.counter.restore(saved["counter"])
        torch.set_rng_state(saved["random"])

    # --- in the stage again ---

    def _undisturbed(self, part: str, plan: tuple[int, ...]) -> Any:
        """Result and state of an undisturbed process with these slices."""
        key = (part, plan)
        if key not in self.known:
            answer = apart(lambda: self._reference(part, plan), CALM)
            assert not answer.died, answer.died
            self.known[key] = answer.value
        return self.known[key]

    def _reference(self, part: str, plan: tuple[int, ...]) -> Any:
        if part == "back" and len(plan) != self.judged.slices:
            return self.judged.accumulated(plan)
        return self.judged.undisturbed(plan)

    def judge(self, outcome: Outcome) -> list[str]:
        from helpers.recovery_world import differences

        kept = outcome.values
        wrong: list[str] = []
        if outcome.error == "":
            results, state = self._undisturbed(self.part, kept["plan"])
            if self.part == "call":
                wrong += differences(results[-1], kept["result"], f"result of {kept['plan']}")
            wrong += differences(state, kept["state"], f"state after {kept['plan']}")
        elif outcome.error == "OutOfMemory" and not kept["committed"]:
            wrong += kept["changed"]
        if "again" in kept:
            plan, result, state = kept["again"]
            results, expected = self._undisturbed("call", plan)
            wrong += differences(results[-1], result, f"next result of {plan}")
            wrong += differences(expected, state, f"next state of {plan}")
        return wrong
