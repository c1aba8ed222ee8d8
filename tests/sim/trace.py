"""A fingerprint of all that an engine planned, all that came back and all that it said."""

from functools import partial
from hashlib import blake2b

from segue.contract.step import Runtime, Sampling, SeqStep, StepHandle, StepPlan, StepResult
from segue.runtime.runtime import OnDemand


class Trace:
    """Equal traces: the same was planned, computed and said, in the same order."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def add(self, value: object) -> None:
        self._hash.update(repr(value).encode())

    @property
    def fingerprint(self) -> str:
        return self._hash.hexdigest()


class TracedRuntime:
    """Passes steps on to a runtime and notes them down.

    Block tables and histories grow while a step runs on a thread, so compare only runs without one.
    """

    def __init__(self, runtime: Runtime, trace: Trace) -> None:
        self._runtime = runtime
        self._trace = trace

    @property
    def vocab_size(self) -> int:
        return self._runtime.vocab_size

    def is_ready(self, sampling: Sampling, *, wait_s: float = 0.0) -> bool:
        return self._runtime.is_ready(sampling, wait_s=wait_s)

    def submit(self, plan: StepPlan) -> StepHandle:
        handle = self._runtime.submit(plan)
        return OnDemand(partial(self._note, plan, handle))

    def _note(self, plan: StepPlan, handle: StepHandle) -> StepResult:
        self._trace.add((plan.step, plan.copies))
        for seq in plan.seqs:
            self._trace.add([getattr(seq, name) for name in SeqStep.__struct_fields__])
        result = handle.result()
        self._trace.add(result)
        return result

    def close(self) -> None:
        self._runtime.close()
