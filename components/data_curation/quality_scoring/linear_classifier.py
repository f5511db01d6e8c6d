"""A linear quality classifier: logistic regression on hashed word and character n-grams, trained from examples.

The features need no vocabulary, so a row's score depends only on the row and the examples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from components.common import personal_data
from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError
from components.common.runtime.reporters import Reporter
from components.data_curation import text_normalization
from components.data_curation.config import DataCurationConfig
from components.data_curation.filters import redaction
from components.data_curation.quality_scoring.scorer_interface import KeptRows, ScorerResult
from components.data_curation.reading import file_readers, record_formats
from components.data_curation.reading.raw_records import Record, Source, UnreadableRecord
from components.data_curation.rows import extract_text

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


MIN_EXAMPLES = 20  # per class
MAX_EXAMPLES = 20_000  # per class
MAX_EXAMPLES_CHARACTERS = 5_000_000  # per class; features take about 70 bytes per character
BATCH_ROWS = 100  # to score at once; bounds the memory of their features
MAX_CHARACTERS = 20_000  # of a row, from its start; bounds the memory of its features
FOLDS = 5
MIN_AUC = 0.6  # below, the scores are hardly better than chance (0.5)
WORD_OR_SIGN = r"(?u)\w+|[^\w\s]"
FEATURES = 1 << 18  # per kind of n-gram
KEY = "data_curation.quality_scores.classifier"


@dataclass
class QualityClassifier:
    """A trained classifier. The score is the probability of a good row if both classes are equally frequent.

    Attributes:
        model: the fitted LogisticRegression.
        minimum: the lowest score of a kept row; None for no limit.
        auc: the area under the ROC curve of the examples in a cross-validation with FOLDS folds.
        examples: the number of examples by class, without repetitions.
    """

    model: Any
    minimum: float | None
    auc: float
    examples: dict[str, int]
    notes: list[str] = field(default_factory=list)
    maximum: float | None = None
    name: str = "classifier"
    description: str = "probability that the row is good, from 0 to 1"
    bin_edges: Sequence[float] = tuple(edge / 10 for edge in range(11))

    @staticmethod
    def train(
        good: Sequence[Source], bad: Sequence[Source], config: DataCurationConfig, seed: int, reporter: Reporter
    ) -> QualityClassifier:
        """Train the classifier on the rows of the files.

        Args:
            good: files of good rows.
            bad: files of bad rows.
            config: the stage's configuration.
            seed: the seed of the folds.
            reporter: receives progress and warnings.

        Raises:
            InputError: a class has fewer than MIN_EXAMPLES different rows, or a file changed since it was listed.
        """
        import numpy as np
        from sklearn.linear_model import LogisticRegression
        from sklearn.metrics import roc_auc_score
        from sklearn.model_selection import StratifiedKFold, cross_val_predict

        reporter.step("training the quality classifier")
        notes: list[str] = []
        texts = {
            "good": _read_examples("good", good, config, notes),
            "bad": _read_examples("bad", bad, config, notes),
        }
        if shared := texts["good"].keys() & texts["bad"].keys():
            shared_examples = format_count(len(shared), "example that is", "examples that are")
            notes.append(f"ignored {shared_examples} both good and bad")
        chosen: list[list[str]] = []
        for label, by_digest in texts.items():
            digests = sorted(by_digest.keys() - shared)
            if len(digests) < MIN_EXAMPLES:
                raise InputError(
                    f"{KEY}.{label} contains {format_count(len(digests), 'different row')}; expected at least {MIN_EXAMPLES}"
                    + (f" ({notes[0]})" if notes else ""),
                    hint=f"Add examples to the files of {KEY}.{label}, or remove the section classifier.",
                )
            sizes = accumulate(len(by_digest[digest]) for digest in digests[:MAX_EXAMPLES])
            used = max(sum(size <= MAX_EXAMPLES_CHARACTERS for size in sizes), MIN_EXAMPLES)
            if used < len(digests):
                notes.append(f"{used:,} of the {label} examples are used, chosen by the hash of their text")
            chosen.append([by_digest[digest] for digest in digests[:used]])
        labels: np.ndarray = np.repeat([1, 0], [len(chosen[0]), len(chosen[1])])
        features = extract_features([*chosen[0], *chosen[1]])
        # liblinear runs in one thread, so the weights do not depend on the number of cores.
        model = LogisticRegression(solver="liblinear", C=10.0, class_weight="balanced", random_state=seed)
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
        held_out = cross_val_predict(model, features, labels, cv=folds, method="predict_proba")[:, 1]
        auc = round(float(roc_auc_score(labels, held_out)), 4)
        if auc < MIN_AUC:
            notes.append(
                f"the quality classifier hardly separates good from bad examples: AUC {auc:.2f} in a cross-validation "
                f"(0.5 is chance, 1 is perfect). Add examples that differ in quality before you set {KEY}.min_score"
            )
        for note in notes:
            reporter.note(note)
        examples = {"good_examples": len(chosen[0]), "bad_examples": len(chosen[1])}
        return QualityClassifier(
            model.fit(features, labels), config.quality_scores.classifier.min_score, auc, examples, notes
        )

    def score(self, rows: KeptRows, reporter: Reporter) -> ScorerResult:
        """Return the probability of a good row for each row."""
        import numpy as np

        scores: np.ndarray = np.full(len(rows.is_kept), np.nan)
        done = 0
        for indices, contents in rows.iterate_contents():
            for begin in range(0, len(indices), BATCH_ROWS):
                features = extract_features([extract_text(one) for one in contents[begin : begin + BATCH_ROWS]])
                scores[indices[begin : begin + BATCH_ROWS]] = self.model.predict_proba(features)[:, 1]
            done += len(indices)
            reporter.progress(done, rows.count, "rows")
        return ScorerResult(scores, {"auc": self.auc, **self.examples}, self.notes)


def extract_features(texts: Sequence[str]) -> csr_matrix:
    """Return the features of texts: hashed word 1- and 2-grams and character 3- and 4-grams, one row per text."""
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import HashingVectorizer

    starts = [text[:MAX_CHARACTERS] for text in texts]
    words = HashingVectorizer(n_features=FEATURES, ngram_range=(1, 2), token_pattern=WORD_OR_SIGN)
    characters = HashingVectorizer(n_features=FEATURES, analyzer="char_wb", ngram_range=(3, 4))
    return hstack([words.transform(starts), characters.transform(starts)], format="csr")


def _read_examples(
    label: str, sources: Sequence[Source], config: DataCurationConfig, notes: list[str]
) -> dict[bytes, str]:
    """Return the texts of the examples by digest, cleaned and redacted as the rows of the dataset are."""
    texts: dict[bytes, str] = {}
    unreadable, first = 0, ""
    for source in sources:
        with closing(file_readers.read_records(source, config)) as records:
            for record in records:
                try:
                    rows = _parse_example(record, config)
                except record_formats.RecordFormatError as error:
                    unreadable += 1
                    first = first or f"{record.file}:{record.line}: {personal_data.mask(str(error))}"
                    continue
                for text in rows:
                    texts[hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()] = text
                if len(texts) > 2 * MAX_EXAMPLES:  # one more than MAX_EXAMPLES shows that some are left out
                    texts = {digest: texts[digest] for digest in nsmallest(MAX_EXAMPLES + 1, texts)}
    if unreadable:
        problem = "is unreadable:" if unreadable == 1 else "are unreadable; the first is"
        notes.append(f"{unreadable:,} of the {label} examples {problem} {first}")
    return texts


def _parse_example(record: Record | UnreadableRecord, config: DataCurationConfig) -> list[str]:
    """Return the texts of a record's rows. Raises RecordFormatError if it is unreadable."""
    if isinstance(record, UnreadableRecord):
        raise record_formats.RecordFormatError(record.reason)
    texts = []
    for row in record_formats.parse_record(record, record.format or config.format):
        text_normalization.normalize_row(row)
        redaction.redact_row(row, config.personal_data)
        if text := row.text().strip():
            texts.append(text[:MAX_CHARACTERS])
    return texts
