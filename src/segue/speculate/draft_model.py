"""A smaller model proposes (Leviathan et al. 2023). Its KV lies in the target's block tables, in memory of its own.

One round for all sequences: first it computes what it is behind by, then one id after the other.

    ids known   a b c d e            draft_start = 2, count = 3
    pass 1          c d e → p0
    pass 2                p0 → p1
    pass 3                   p1 → p2     draft_kv_len = 5: proposals do not count until the target has agreed
"""

from collections.abc import Sequence

from segue.contract.step import Executor, Sampling, SeqStep
from segue.speculate.drafter import DraftRequest, Proposal

_GREEDY = Sampling()


class DraftModelDrafter:
    """Drafts of a model with the target's vocabulary. Takes over the executor."""

    has_kv = True

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def propose(
        self, requests: Sequence[DraftRequest], copies: Sequence[tuple[int, int]]
    ) -> Sequence[Proposal]:
        proposals = [Proposal() for _ in requests]
        drafts: dict[int, list[int]] = {}
        steps = []
        for i, request in enumerate(requests):
            end = request.first + len(request.token_ids)
            if request.draft_start is None or end > self._executor.max_model_len:
                continue
            start = min(request.draft_start, end - 1)
            drafts[i] = []
            steps.append(
                self._step(request, start, request.token_ids[start - request.first :], request.count)
            )
        if steps or copies:
            self._round(requests, drafts, steps, copies)
        for i, ids in drafts.items():
            proposals[i] = Proposal(ids, requests[i].first + len(requests[i].token_ids))
        return proposals

    def _round(
        self,
        requests: Sequence[DraftRequest],
        drafts: dict[int, list[int]],
        steps: list[SeqStep],
        copies: Sequence[tuple[int, int]],
    ) -> None:
        """Compute `steps` and go on, one id at a time, with the sequences that want more.

        A sequence that cannot be computed leaves `drafts`, unless it was wrong only in what it drafted.
        """
        active = list(drafts)
        while steps or copies:
            result = self._executor.forward(steps, copies)
            copies = ()
            sampled = iter(result.tokens)
            more, next_steps = [], []
            for at, (i, step) in enumerate(zip(active, steps, strict=True)):
                if at in result.errors:
                    if not drafts[i]:
                        del drafts[i]
                    continue
                if step.sampling is None:
                    continue
                token = next(sampled)
                drafts[i].append(token)
                request, start = requests[i], step.start + len(step.tokens)
                if len(drafts[i]) < request.count and start < self._executor.max_model_len:
                    more.append(i)
                    next_steps.append(self._step(request, start, (token,), 1))
            active, steps = more, next_steps

    def _step(self, request: DraftRequest, start: int, tokens: Sequence[int], count: int) -> SeqStep:
        sampling = request.sampling
        if sampling is None or sampling.needs_history or sampling.num_logprobs is not None:
            sampling = _GREEDY
        return SeqStep(
            start=start, tokens=tokens, blocks=request.blocks, sampling=sampling if count > 0 else None
        )

    def close(self) -> None:
        self._executor.close()
