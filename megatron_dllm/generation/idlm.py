"""Introspective strided decoding of models trained with `--dllm-mode idlm` (I-DLM, 2025).

Both streams predict the next token: the clean one as an autoregressive model, the noisy one from masks. One pass runs
the last token and the draft after it as clean tokens, and a block of masks behind them. The clean logits say how much
of the draft is kept, and what comes after that; if all of it was, the masks' logits are the next draft already, as they
have seen nothing that was refused. So a pass writes up to a block and one token more, and what is written is what the
autoregressive model would write (`nemotron.verify`; at temperature 0 the same tokens, above the same distribution).
"""

import torch

from megatron_dllm.generation.nemotron import CausalRow, verify
from megatron_dllm.generation.network import Pass
from megatron_dllm.generation.prompts import Canvas
from megatron_dllm.generation.rows import Decoding


class StridedRow(CausalRow):
    def __init__(self, canvas: Canvas, decoding: Decoding):
        super().__init__(canvas, decoding)
        self._stride = self.config.gen_block_length or decoding.args.dllm_block_size
        self._draft = (self.tokens[:0], None)  # ids and the distributions they were drawn from

    def passes(self) -> list[Pass]:
        clean = self.length + len(self._draft[0])
        # the last token of all is predicted at the place before it
        end = clean + min(self._stride, max(0, len(self.tokens) - clean - 2))
        return [self.view(end, torch.arange(self.length - 1, end), clean, guesses=self._draft[0])]

    def take(self, logits: list[torch.Tensor]) -> None:
        ids, q_CV = self._draft
        candidates = self.candidates(logits[0])
        p_NV, drawn = candidates.distribution().cpu(), candidates.draw("draft").cpu()
        verified = len(ids) + 1
        new, trust = verify(ids, q_CV, p_NV[:verified], self.draws)
        self.append_verified(new, trust)
        self._draft = (self.tokens[:0], None)
        if len(new) == verified:
            self._draft = drawn[verified:], p_NV[verified:]
