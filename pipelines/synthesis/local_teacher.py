"""A teacher on this machine: a base model or a tuned model, whose answers a grammar constrains to a JSON schema."""

from __future__ import annotations

import functools
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from components.common.artifacts.artifact_folder import ArtifactInput
from components.common.models import chat_templates, model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime.reporters import Reporter
from components.evaluation import engine_loading, task_interface
from components.evaluation.answer_generation import SeededSampler, collect_end_token_ids, reset_generation_config
from pipelines.synthesis.journal import Answer, Journal
from pipelines.synthesis.teacher_budget import TeacherBudget
from pipelines.synthesis.teachers import Sampling, TeacherRequest

if TYPE_CHECKING:
    import torch

    from components.triton_packaging.python_backend.answer_grammar import AnswerGrammar

NO_GRAMMAR_NOTE = (
    "the package llguidance is not installed, so answers are not constrained to JSON: pip install 'tuneline[packaging]'"
)


class LocalTeacher:
    """A teacher in this process. A batch is answered whole, so an answer depends neither on interruptions nor on speed.

    Args:
        model: the model.
        concurrency: the number of answers per batch.
        reporter: receives the progress.
    """

    def __init__(self, model: LoadableModel, concurrency: int, reporter: Reporter) -> None:
        self._source, self.concurrency, self._reporter = model, concurrency, reporter
        self.name = model.base.name if model.artifact is None else model.artifact.path.name
        self.sha256 = model.sha256
        self.inputs: Sequence[ArtifactInput] = [model.as_input()]

    @functools.cached_property
    def _loaded(self) -> tuple[Any, Any]:
        """The model and its tokenizer, loaded with the first request that is not in the journal."""
        self._reporter.step(f"loading {self.name}")
        device = model_loading.prepare_torch(0)
        model = engine_loading.load_tuned(self._source, None, self._reporter).to(device)
        tokenizer = model_loading.load_tokenizer(self._source.tokenizer)
        reset_generation_config(model, tokenizer)
        return model, tokenizer

    @functools.cached_property
    def _compile_grammar(self) -> Callable[[str], AnswerGrammar] | None:
        if importlib.util.find_spec("llguidance") is None:
            self._reporter.note(NO_GRAMMAR_NOTE)
            return None
        from components.triton_packaging.python_backend.answer_grammar import GrammarCompiler

        model, tokenizer = self._loaded
        return GrammarCompiler(tokenizer, collect_end_token_ids(model, tokenizer)).compile

    def answer(
        self, requests: Sequence[TeacherRequest], journal: Journal, budget: TeacherBudget, count: Callable[[], None]
    ) -> None:
        """See `Teacher.answer`. Batches are formed from all requests, so an interruption does not change them."""
        for begin in range(0, len(requests), self.concurrency):
            batch = requests[begin : begin + self.concurrency]
            unknown = [request for request in batch if journal.get(request.key) is None]
            if not unknown:
                continue
            budget.try_reserve(
                "batch",
                sum(request.input_tokens for request in unknown),
                sum(request.sampling.max_tokens for request in unknown),
            )
            budget.reserved.clear()
            for answer in self._answer_batch(batch):
                if journal.get(answer.key) is None:
                    journal.add(answer)
                    budget.add(answer)
                    count()

    def _answer_batch(self, batch: Sequence[TeacherRequest]) -> list[Answer]:
        import torch
        from transformers import GenerationConfig

        model, tokenizer = self._loaded
        start = time.monotonic()
        prompts = [chat_templates.encode_prompt(tokenizer, request.messages) for request in batch]
        ends = collect_end_token_ids(model, tokenizer)
        padding = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)
        width = max(map(len, prompts))
        ids = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampling = batch[0].sampling
        processors: list[Any] = []
        if batch[0].schema is not None and (compile_grammar := self._compile_grammar):
            processors.append(_GrammarProcessor([compile_grammar(json.dumps(one.schema)) for one in batch], width))
        if sampling.temperature:
            processors.append(SeededSampler(_to_engine_sampling(sampling, batch), [one.seed for one in batch]))
        # The most likely token after a SeededSampler is a sampled one.
        greedy = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=padding,
            eos_token_id=ends,
        )
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                generation_config=greedy,
                logits_processor=processors,
            )
        seconds = round(time.monotonic() - start, 3)
        answers = []
        for request, prompt, row in zip(batch, prompts, output[:, width:].tolist(), strict=True):
            length = next((number + 1 for number, token in enumerate(row) if token in ends), len(row))
            is_truncated = row[length - 1] not in ends if row else False
            text = tokenizer.decode(row[:length], skip_special_tokens=True)
            answers.append(
                Answer(request.key, text, is_truncated, len(prompt), length, seconds=seconds, model=self.name)
            )
        return answers


def _to_engine_sampling(sampling: Sampling, batch: Sequence[TeacherRequest]) -> task_interface.Sampling:
    seeds = tuple(request.seed for request in batch)
    return task_interface.Sampling(sampling.temperature, sampling.top_p, seeds)


class _GrammarProcessor:
    """Logits processor that allows the tokens which the grammar of each row can continue with."""

    def __init__(self, grammars: Sequence[AnswerGrammar], prompt_length: int) -> None:
        self._grammars, self._prompt_length = grammars, prompt_length
        self._is_ended = [False] * len(grammars)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        import torch

        rows = []
        for number, grammar in enumerate(self._grammars):
            if input_ids.shape[1] > self._prompt_length and not self._is_ended[number]:
                token = int(input_ids[number, -1])
                self._is_ended[number] = token == grammar.end_token
                if not self._is_ended[number]:
                    grammar.advance(token)
            row = scores[number : number + 1]
            rows.append(row if self._is_ended[number] else grammar.mask(row))
        return torch.cat(rows)
