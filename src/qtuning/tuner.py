"""QTuner: one frozen model that keeps learning tasks and answers all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace as replaced
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from qtuning.backbones import Backbone, load_backbone
from qtuning.collection import (
    Collection,
    damage_named,
    manifest_sha,
    read_collection,
    write_collection,
)
from qtuning.config import make_settings, settings_dict
from qtuning.errors import CollectionError, ConfigError, TaskError, unknown
from qtuning.evaluation import score_predictions
from qtuning.fit import FitState
from qtuning.hub import check_repo, local_folder, push_folder
from qtuning.keys import Found, learn_key, with_key
from qtuning.lanes import Report, fit_lanes
from qtuning.methods import make_method
from qtuning.predictor import Answer, Predictor, check_texts, make_predictor
from qtuning.presets import get_preset
from qtuning.progress import LearningBar
from qtuning.snapshots import Snapshot, TaskCard, added, answers_from_snapshots, snapshot_for
from qtuning.tasks import SPLIT_NAMES, Rows, Split, Task, Text


class QTuner:
    """Learns tasks one after another on one frozen model; nothing learnt earlier ever changes.

    Args:
        model: Short name, hub id or local folder; or a `Backbone` you already have.
        method: A registered method; see `qtuning ls methods`.
        seed: Of everything random.
        dtype: `fp32` or `bf16`.
        device: `cpu`, `cuda`, …
        readout: What an encoder's head reads, `mean` or `cls`; `peft` is the layout that PEFT can take.
        max_length: Positions of prompt, text and answer together.
        preset: Settings under a name, such as `smollm2`, or a YAML file of `qtuning tune`; `settings` override it.
        **settings: Any field of `MethodSettings` or `TrainSettings`, e.g. `queue_size=5`.

    Example:
        >>> tuner = QTuner("minilm", queue_size=4)  # doctest: +SKIP
        >>> tuner.learn(Task.from_csv("refunds.csv"))  # doctest: +SKIP
        >>> tuner.predict("Where is my money?", task="refunds")  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | Backbone = "minilm",
        *,
        method: str = "q-tuning",
        seed: int = 0,
        dtype: str = "fp32",
        device: str | None = None,
        readout: str = "mean",
        max_length: int | None = None,
        preset: str | PathLike[str] | None = None,
        **settings: Any,
    ):
        settings = {**(get_preset(preset, method) if preset else {}), **settings}
        make_settings(**settings)  # refuse a wrong setting before the model is loaded
        if not isinstance(seed, int | np.integer) or isinstance(seed, bool):
            raise ConfigError(f"seed must be a whole number, got {seed!r}.")
        seed = int(seed)
        self.backbone = (
            model
            if isinstance(model, Backbone)
            else load_backbone(
                model, dtype=dtype, device=device, readout=readout, max_length=max_length
            )
        )
        self.seed, self.method_name = seed, method
        self.method_settings, self.train_settings = make_settings(self.backbone.family, **settings)
        self.method: Any = make_method(
            method, self.backbone, self.method_settings, self.train_settings
        )
        self._versions: dict[str, int] = {}
        self._home: tuple[Path, str] | None = None
        self.state: Any = None
        self.predictor = Predictor(self.backbone, {})
        self.adopt(self.method.start(seed))

    @property
    def tasks(self) -> dict[str, TaskCard]:
        """The tasks it knows, in the order in which it learnt them."""
        return {name: snapshot.card for name, snapshot in self.state.snapshots.items()}

    def version(self, name: str) -> int:
        """How often a task was taught."""
        return self._versions.get(name, 1)

    # ── learning ─────────────────────────────────────────────────────────────────────────────

    def learn(
        self,
        task: Task,
        *,
        replace: bool = False,
        progress: bool = True,
        report: Report | None = None,
        checkpoint: Callable[[FitState], None] | None = None,
        resume: FitState | None = None,
    ) -> dict[str, Any]:
        """Learn one more task; returns its scores, split and cost.

        Args:
            task: The labelled texts.
            replace: Learn a new version of a task it already knows; the old one answers until the
                new one is finished. What queue and shared prefix took from the old one stays in them.
            progress: Show a bar on a terminal, elsewhere a line on standard error every half minute.
            report: Called after every epoch, beside the bar.
            checkpoint: Called after every epoch with what continuing needs (methods that train in lanes).
            resume: What an earlier `checkpoint` was given, on the same state; training goes on from there.
        """
        if not isinstance(task, Task):
            raise TaskError(
                f"learn takes a Task, got {type(task).__name__} {task!r:.60}; make one with Task(…), "
                "Task.from_csv(…) or load_task(…)."
            )
        self._check_free(task.name, replace)
        train = self.train_settings
        split = task.split(train.shots, self.seed, train.validation_limit)
        began = time.perf_counter()
        with LearningBar(quiet=not progress) as bar:

            def both(now: Any) -> None:
                bar(now)
                if report:
                    report(now)

            learnt = self._fit(task, split, both, checkpoint, resume)
            learnt = with_key(learnt, task.name, learn_key(self.backbone, split))
        seconds = time.perf_counter() - began
        snapshots = dict(learnt.snapshots)
        new = snapshots.pop(task.name)
        predictor = make_predictor(self.backbone, learnt, self.predictor)
        test = _score_rows(predictor, new.card, split.test) if len(split.test) else None
        facts = {
            **new.facts,
            "test_score": test,
            "seconds": round(seconds, 3),
            "notes": list(split.notes),
        }
        snapshots[task.name] = replaced(new, facts=facts)
        self.adopt(replaced(learnt, snapshots=snapshots))
        self._versions[task.name] = self._versions.get(task.name, 0) + 1
        hidden = ("scale_u",)
        return {"task": task.name, "version": self._versions[task.name],
                **{key: value for key, value in facts.items() if key not in hidden}}  # fmt: skip

    def _fit(
        self,
        task: Task,
        split: Split,
        report: Report,
        checkpoint: Callable[[FitState], None] | None,
        resume: FitState | None,
    ) -> Any:
        """The state after this task."""
        if not hasattr(self.method, "lane"):
            return self.method.learn(self.state, task, split, report)
        lane = self.method.lane(self.state, task, split)
        facts = fit_lanes(
            self.backbone,
            [lane],
            self.train_settings,
            report,
            checkpoint=(lambda fits: checkpoint(fits[0])) if checkpoint else None,
            resume=[resume] if resume else None,
        )
        return lane.finish(facts[0])

    def remove(self, name: str) -> None:
        """Forget a task's snapshot. What queue and shared prefix took from it stays in them."""
        if name not in self.state.snapshots:
            raise TaskError(unknown("task", name, self.state.snapshots))
        left = {key: value for key, value in self.state.snapshots.items() if key != name}
        self.adopt(replaced(self.state, snapshots=left))

    def add_prompt(
        self, snapshot: Snapshot, *, texts: Sequence[Text] = (), replace: bool = False
    ) -> None:
        """Take in a prompt that was trained elsewhere (see `import_peft`) as a task.

        It answers like any other task. It has no part in queue and shared prefix: later tasks do not learn from it.

        Args:
            snapshot: The prompt with its labels.
            texts: Some of the task's texts, from which its key is learnt; without them it has no key, and
                texts must be asked with their task.
            replace: Take the place of a task of that name.
        """
        name = snapshot.card.name
        self._check_free(name, replace)
        if not answers_from_snapshots(self.state):
            raise TaskError(
                f"method {self.method_name!r} does not answer tasks by prompts of their own, so {name!r} cannot be "
                f"added; use q-tuning or another method with one prompt per task."
            )
        if snapshot.rows.shape[-1] != self.backbone.embed_dim:
            raise TaskError(
                f"the prompt of {name!r} has vectors of {snapshot.rows.shape[-1]} numbers, and {self.backbone.name!r} "
                f"needs {self.backbone.embed_dim}; add it to the model it was trained on."
            )
        if (snapshot.head is not None) != self.backbone.needs_head:
            raise TaskError(
                f"{name!r} was trained on a model of another family than {self.backbone.name!r} "
                f"({self.backbone.family}); add it to the model it was trained on."
            )
        state = replaced(self.state, snapshots=added(self.state.snapshots, snapshot))
        if texts:
            check_texts(texts)
            rows, none = Rows(tuple(texts), (0,) * len(texts)), Rows((), ())
            key = learn_key(self.backbone, Split(rows, none, none))
            state = with_key(state, name, key)
        self.adopt(state)
        self._versions[name] = self._versions.get(name, 0) + 1

    def _check_free(self, name: str, replace: bool) -> None:
        if name in self.state.snapshots and not replace:
            raise TaskError(
                f"a task named {name!r} is already in the collection; rename it, or replace it "
                f"(replace=True, --replace)."
            )

    # ── answering ────────────────────────────────────────────────────────────────────────────

    @overload
    def predict(self, texts: str | tuple[str, str], task: str | None = None) -> str: ...
    @overload
    def predict(self, texts: list[Text], task: str | Sequence[str] | None = None) -> list[str]: ...
    def predict(self, texts: Any, task: Any = None) -> str | list[str]:
        """The label of a text, or of each text of a list; `task` may name one per text.

        A pair of texts is a tuple. Texts of different tasks share the same passes and are answered
        as they would be one by one. Without a task, each text's is found first (see `answer`), and a
        text of no known task is `unknown`.
        """
        if task is None and len(self.tasks) > 1:
            found = self.answer(texts)
            return [each.label for each in found] if isinstance(found, list) else found.label
        probabilities = self.predict_proba(texts, task)
        if isinstance(probabilities, dict):
            return max(probabilities, key=probabilities.__getitem__)
        return [max(each, key=each.__getitem__) for each in probabilities]

    def answer(self, texts: Any) -> Answer | list[Answer]:
        """Task, similarity and label of a text, or of each text of a list, without being told the task."""
        single = not isinstance(texts, list)
        rows: list[Text] = [texts] if single else texts
        answers = self.predictor.answer(rows, [None] * len(rows))
        return answers[0] if single else answers

    def find_tasks(self, texts: list[Text]) -> list[Found]:
        """The task of each text, by the keys that were learnt with the tasks."""
        return self.predictor.find_tasks(texts)

    def predict_proba(
        self, texts: Any, task: str | Sequence[str] | None = None
    ) -> dict[str, float] | list[dict[str, float]]:
        """Probabilities by label, for a text or for each text of a list."""
        single = not isinstance(texts, list)
        rows: list[Text] = [texts] if single else texts
        found = self.predictor.probabilities(rows, self._task_per_text(rows, task))
        return found[0] if single else found

    def score(
        self,
        task: Task,
        *,
        part: str = "test",
        match: str = "label",
        max_tokens: int | None = None,
        evaluate_with: str = "snapshot",
    ) -> float:
        """The task's metric on its own labelled rows, or the share of exact matches.

        Args:
            task: The labelled texts.
            part: `test`, `validation` or `train`: the rows marked so or, where no rows are marked,
                that part of the split it was taught with; `all` takes every row.
            match: `label` chooses among the labels; `exact` asks whether greedy generation would
                write the label words exactly and then stop (causal and seq2seq models).
            max_tokens: For `exact`: compare only so many tokens, as generation with a limit would.
            evaluate_with: `shared` puts today's shared prefix into the task's snapshot, `current` answers with today's
                prefix and queue instead of it.
        """
        if task.name not in self.state.snapshots:
            raise TaskError(unknown("task", task.name, self.state.snapshots))
        card = self.tasks[task.name]
        if tuple(task.label_names) != card.label_names:
            raise TaskError(
                f"task {task.name!r} was learnt with the labels {', '.join(card.label_names)}; "
                f"these rows have {', '.join(task.label_names)}."
            )
        train = self.train_settings
        if part not in (*SPLIT_NAMES, "all"):
            raise ConfigError(unknown("part", part, (*SPLIT_NAMES, "all")))
        if task.splits is None and part != "all":
            rows = getattr(task.split(train.shots, self.seed, train.validation_limit), part)
        else:
            rows = task.rows(part)
        if not len(rows):
            raise TaskError(
                f"task {task.name!r} has no {part} rows to score; use part='all' for all of them."
            )
        predictor = self.predictor
        if evaluate_with != "snapshot":
            snapshot = snapshot_for(self.state, task.name, evaluate_with)
            predictor = Predictor(self.backbone, {task.name: snapshot})
        if match == "exact":
            names = [task.name] * len(rows)
            hits = predictor.exact_matches(rows.texts, names, rows.labels, max_tokens)
            return sum(hits) / len(hits)
        if match != "label":
            raise ConfigError(unknown("match", match, ("label", "exact")))
        return _score_rows(predictor, card, rows)

    def _task_per_text(self, rows: list[Text], task: str | Sequence[str] | None) -> list[str]:
        if task is None:
            task = (
                next(iter(self.tasks))
                if len(self.tasks) == 1
                else [found.task for found in self.find_tasks(rows)]
            )
        names = [task] * len(rows) if isinstance(task, str) else list(task)
        if len(names) != len(rows):
            raise TaskError(f"{len(rows)} texts but {len(names)} task names; give one per text.")
        return names

    def adopt(self, state: Any) -> None:
        """Go on from a state of the same method on the same backbone, e.g. one that `run_stream` left."""
        self.state = state
        self.predictor = make_predictor(self.backbone, state, self.predictor)

    # ── keeping ──────────────────────────────────────────────────────────────────────────────

    def save_pretrained(self, folder: str | PathLike[str], *, overwrite: bool = False) -> None:
        """Save the collection; a kill at any moment leaves the old collection or the new one."""
        path = Path(folder)
        came_from = self._home[1] if self._home and self._home[0] == path.resolve() else None
        sha, self._versions = write_collection(
            path, self._collection(), "" if overwrite else came_from
        )
        self._home = (path.resolve(), sha)

    def push_to_hub(
        self, repo: str, *, private: bool | None = None, token: str | None = None
    ) -> str:
        """Upload the collection with its model card; returns the address. `from_pretrained(repo)` opens it.

        Args:
            repo: `owner/name`; made if it is not there yet.
            private: Of a new repository; the account's default where it is not said.
            token: The one you are logged in with by default.
        """
        check_repo(repo)
        with TemporaryDirectory() as folder:
            write_collection(Path(folder), self._collection())
            replaces = ("tasks/*", "state-*.safetensors")
            return push_folder(folder, repo, private=private, token=token, replaces=replaces)

    def refresh(self) -> bool:
        """Take over what another process saved where this collection came from; whether there was anything.

        Tasks that are as they were stay the same objects, so that nothing has to be prepared again for them. Another
        collection in that folder is refused: its prompts mean nothing to our model, and saving would call them ours.
        """
        if self._home is None:
            raise CollectionError("this collection was not opened from a folder; save it first.")
        folder, known = self._home
        if manifest_sha(folder) == known:
            return False
        saved, sha = read_collection(folder)
        with damage_named(folder):
            ours, theirs = _kind(self._collection()), _kind(saved)
        for key, value in theirs.items():
            if value != ours[key]:
                raise CollectionError(
                    f"{folder} was replaced by a collection with {key} {value!r}, and the open one has {ours[key]!r}; "
                    f"open the folder anew (start a server again), or put the old collection back."
                )
        snapshots = {}
        for name, new in saved.snapshots.items():
            old = self.state.snapshots.get(name)
            snapshots[name] = old if old is not None and old.equals(new) else new
        with damage_named(folder):
            self.adopt(self.method.unpack(saved.tensors, saved.facts, snapshots))
        self._versions, self._home = dict(saved.versions), (folder, sha)
        return True

    def _collection(self) -> Collection:
        tensors, facts = self.method.pack(self.state)
        backbone = self.backbone
        return Collection(
            backbone={
                "name": backbone.name,
                "family": backbone.family,
                "fingerprint": backbone.fingerprint(),
                "dtype": str(backbone.dtype).removeprefix("torch."),
                "readout": backbone.readout,
                "max_length": backbone.max_length,
            },
            method=self.method_name,
            settings=settings_dict(self.method_settings, self.train_settings),
            seed=self.seed,
            tensors=tensors,
            facts=facts,
            snapshots=self.state.snapshots,
            versions={name: self._versions.get(name, 1) for name in self.state.snapshots},
        )

    @classmethod
    def from_pretrained(
        cls,
        folder: str | PathLike[str],
        *,
        model: str | Backbone | None = None,
        dtype: str | None = None,
        device: str | None = None,
    ) -> QTuner:
        """Open a collection from a folder, or from a hub repository of that name.

        Args:
            folder: Where it is.
            model: Where the backbone is, if not under the name it was saved with; it must be the
                same model.
            dtype: As saved by default.
            device: A GPU if there is one by default.
        """
        path = local_folder(folder)
        saved, sha = read_collection(path)
        about = saved.backbone
        backbone = (
            model
            if isinstance(model, Backbone)
            else load_backbone(
                model or about["name"],
                dtype=dtype or about["dtype"],
                device=device,
                readout=about["readout"],
                max_length=about["max_length"],
            )
        )
        for key in ("readout", "max_length"):
            if getattr(backbone, key) != about[key]:
                raise CollectionError(
                    f"{path} was made with {key} {about[key]!r}, and this backbone has {getattr(backbone, key)!r}; "
                    f"load it with the same."
                )
        if backbone.fingerprint() != about["fingerprint"]:
            raise CollectionError(
                f"{path} was made for {about['name']!r} (fingerprint {about['fingerprint'][:12]}…), and "
                f"{backbone.name!r} has other weights ({backbone.fingerprint()[:12]}…). Load the model it was made for."
            )
        with damage_named(path):
            tuner = cls(backbone, method=saved.method, seed=saved.seed, **saved.settings)
            tuner.adopt(tuner.method.unpack(saved.tensors, saved.facts, saved.snapshots))
        tuner._versions = dict(saved.versions)
        tuner._home = (path.resolve(), sha)
        return tuner


def _kind(collection: Collection) -> dict[str, Any]:
    """What stays as it is when a collection learns or forgets."""
    about = collection.backbone
    # an older manifest lacks newer settings: they have their defaults
    settings = make_settings(about["family"], **collection.settings)
    return {
        **{key: about[key] for key in ("fingerprint", "readout", "max_length")},
        "method": collection.method,
        "seed": collection.seed,
        **settings_dict(*settings),
    }


def _score_rows(predictor: Predictor, card: TaskCard, rows: Rows) -> float:
    found: list[Tensor] = predictor.log_probs(rows.texts, [card.name] * len(rows))
    predicted = torch.stack(found).argmax(dim=-1).tolist() if found else []
    return score_predictions(card.metric, rows.labels, predicted, rows.groups)
