"""Scores of generated texts besides BLEU: BLEU of lower orders, METEOR, ROUGE, coverage and repetition."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import sacrebleu

from headwise.errors import HeadwiseError

ROUGE = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}
BOUNDARIES = frozenset(".,;:?!")
# Clauses of fewer words, such as "however", may well occur twice.
CLAUSE = 4


def scores(texts: Sequence[str], references: Sequence[str], entities: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the scores of texts, 0 to 100: "BLEU-1" to "BLEU-4", "METEOR", "ROUGE-1", "ROUGE-2" and "ROUGE-L".

    BLEU-n is sacreBLEU's with orders 1 to n. METEOR is that of NLTK with equal words and equal stems: the stage of
    synonyms needs WordNet's files, which no package brings, and is left out. ROUGE is F1 of Google's rouge-score,
    without stemming, with its recall; METEOR and ROUGE are means over texts, and so are "coverage" and
    "repeated", of `coverage` and `repeated_clauses`. Words are separated by blanks.
    """
    # rouge-score and NLTK take seconds to import, and only what scores a test split needs them
    try:
        from nltk.translate.meteor_score import single_meteor_score
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise HeadwiseError(f"{error.name} is not installed; install headwise-lab, which names it.") from None
    found = {
        f"BLEU-{order}": _bleu(order).corpus_score(list(texts), [list(references)]).score for order in (1, 2, 3, 4)
    }
    wordless: Any = NoSynonyms()
    found["METEOR"] = 100 * fmean(
        single_meteor_score(reference.split(), text.split(), wordnet=wordless)
        for text, reference in zip(texts, references, strict=True)
    )
    scorer = RougeScorer(list(ROUGE.values()), tokenizer=Blanks())
    rouge = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    for name, kind in ROUGE.items():
        found[name] = 100 * fmean(one[kind].fmeasure for one in rouge)
        found[f"{name} recall"] = 100 * fmean(one[kind].recall for one in rouge)
    found["coverage"] = 100 * fmean(coverage(text, named) for text, named in zip(texts, entities, strict=True))
    found["repeated"] = 100 * fmean(repeated_clauses(text) for text in texts)
    return found


def coverage(text: str, entities: Sequence[str]) -> float:
    """Return the share of a graph's entities whose words occur in a text, one after another.

    >>> coverage("we use beam search .", ["beam search", "search", "greedy search"])
    0.6666666666666666
    """
    padded = f" {text} "
    return fmean(f" {entity} " in padded for entity in entities)


def repeated_clauses(text: str) -> float:
    """Return the share of a text's clauses that repeat an earlier one word for word; 0 without clauses.

    A clause is the text between two of `. , ; : ? !`, of at least four words.

    >>> repeated_clauses("we use a model . we use a model , yes .")
    0.5
    """
    clauses, words = [], []
    for word in [*text.split(), "."]:
        if word in BOUNDARIES:
            clauses += [" ".join(words)] if len(words) >= CLAUSE else []
            words = []
        else:
            words.append(word)
    return 1 - len(set(clauses)) / len(clauses) if clauses else 0.0


def signatures(texts: Sequence[str], references: Sequence[str]) -> dict[str, str]:
    """Return how each score is computed, by its name, as libraries sign it or in words."""
    from importlib.metadata import version

    bleu = _bleu(4)
    bleu.corpus_score(list(texts[:1]), [list(references[:1])])
    return {
        "BLEU": str(bleu.get_signature()),
        "METEOR": f"NLTK {version('nltk')}, equal words and stems, no synonyms",
        "ROUGE": f"rouge-score {version('rouge-score')}, F1, no stemming, words at blanks",
    }


class NoSynonyms:
    """A WordNet that knows no word."""

    def synsets(self, _word: str) -> list[Any]:
        """Return no meanings."""
        return []


class Blanks:
    """What cuts a text into words at blanks, for rouge-score."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words."""
        return text.split()


def _bleu(order: int) -> sacrebleu.BLEU:
    # the texts are tokenized already, which sacreBLEU would warn of
    return sacrebleu.BLEU(max_ngram_order=order, force=True)
