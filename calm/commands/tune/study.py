"""The optimizer, and where it keeps its trials: optuna's multi-objective TPE, in memory or in a database.

Each allocator has parameters of its own; a knob has one that says whether it is set, and, only if so, one for
the index of its value. The objectives are ratios to a baseline that ran on the same machine at the same time,
so that several machines can share a study.

optuna proposes settings and stores them. Its `best_trials` is not the front here: a setting's trials are
pooled, and the front is measured again. Its samplers draw from the listed values alone, so `steps` searches
between these.
"""

import json
import math
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from calm.commands.tune.space import Knobs, Setting
from calm.commands.tune.trial import Pair, Tried
from calm.core.allocators import GLIBC
from calm.core.errors import USAGE, CalmError

if TYPE_CHECKING:
    import optuna

_IDENTITY = "calm tune"
_STARTUP_TRIALS = 12
_CONNECT_ATTEMPTS = 10
# Tried first, after each allocator's defaults: what case studies and manuals recommend.
_RECOMMENDED = (
    {"glibc.malloc.trim_threshold": str(32 << 20)},
    {"glibc.malloc.trim_threshold": str(2 << 20)},
    {"glibc.malloc.trim_threshold": str(1 << 30), "glibc.malloc.mmap_threshold": str(32 << 20)},
    {"glibc.malloc.top_pad": str(16 << 20)},
    {"glibc.malloc.arena_max": "1"},
    {"glibc.malloc.tcache_count": "127"},
)


class StudyLostError(CalmError):
    """The database failed during the search."""


class Asked(NamedTuple):
    """A setting that the optimizer proposes."""

    trial: "optuna.Trial"
    setting: Setting


def _full_url(url: str) -> str:
    """With the driver that calmalloc[fleet] installs, unless the URL names one."""
    return re.sub("^postgres(ql)?://", "postgresql+psycopg://", url)


def redacted_url(url: str) -> str:
    """The address of a database without its password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return url.partition(":")[0] + ":…"
    secret = [name for name in parsed.query if "pass" in name.lower()]
    return parsed.difference_update_query(secret).render_as_string(hide_password=True)


def _database_error(url: str, error: BaseException) -> str:
    """The option, and the first line of the database's message, without the password."""
    from sqlalchemy.engine import make_url

    while error.__cause__ is not None:
        error = error.__cause__
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    parsed = make_url(_full_url(url))
    words = [str(value) for name, value in parsed.query.items() if "pass" in name.lower()]
    for secret in filter(None, (*words, parsed.password)):
        text = text.replace(secret, "***")
    return f"--storage {redacted_url(url)}: {text}"


def open_storage(url: str) -> "optuna.storages.RDBStorage":
    """Connects, and creates the tables if there are none."""
    import optuna
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

    full = _full_url(url)
    attempt = 0
    while True:
        attempt += 1
        try:
            return optuna.storages.RDBStorage(full, engine_kwargs={"pool_pre_ping": True})
        except (ArgumentError, NoSuchModuleError, ValueError) as error:
            raise CalmError(
                f"--storage {redacted_url(url)}: not the URL of a database, such as sqlite:///tune.db or "
                "postgresql://user@host/base",
                USAGE,
            ) from error
        except ImportError as error:
            psycopg = full.startswith("postgresql+psycopg:")
            driver = "psycopg: pip install 'calmalloc[fleet]'" if psycopg else "a driver to be installed"
            raise CalmError(f"--storage {redacted_url(url)} needs {driver}", USAGE) from error
        except SQLAlchemyError as error:
            # If two workers create the tables at once, one of them gets an error that they exist.
            exist = "already exists" in str(error) or "UNIQUE" in str(error).upper()
            if attempt == _CONNECT_ATTEMPTS or not exist:
                raise CalmError(_database_error(url, error)) from error
            time.sleep(0.2 * attempt)


class Study:
    """Asks the optimizer for settings and gives it their figures, within `storage_errors`."""

    def __init__(
        self,
        spaces: Mapping[str, Knobs],
        *,
        seed: int | None = None,
        storage: "optuna.storages.RDBStorage | None" = None,
        name: str | None = None,
        identity: Mapping[str, Any] | None = None,
        machine: Mapping[str, str] | None = None,
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        self._optuna = optuna
        self.spaces = spaces
        self._url = storage.url if storage else None
        self.machine = dict(machine or {})
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=_STARTUP_TRIALS,
            multivariate=True,
            group=True,
            constant_liar=storage is not None,
            seed=seed,
        )
        with self.storage_errors():
            self._study = optuna.create_study(
                directions=["minimize", "minimize"],
                sampler=sampler,
                storage=storage,
                study_name=name,
                load_if_exists=storage is not None,
            )
            if identity is not None:
                self._check_identity(dict(identity), name)
            if not self._study.get_trials(deepcopy=False):
                defaults = [Setting(each) for each in self.spaces if each != GLIBC]
                for setting in [*defaults, *(Setting(GLIBC, values) for values in _RECOMMENDED)]:
                    self.enqueue(setting)

    @contextmanager
    def storage_errors(self) -> Iterator[None]:
        """Raises StudyLostError for what the database raises."""
        if self._url is None:
            yield
            return
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (SQLAlchemyError, self._optuna.exceptions.StorageInternalError) as error:
            raise StudyLostError(_database_error(self._url, error)) from error

    def _check_identity(self, identity: Mapping[str, Any], name: str | None) -> None:
        """Refuses a study of another program, or of other figures; a new one gets this identity."""
        is_new = _IDENTITY not in self._study.user_attrs
        if len(self._study.directions) != 2 or (is_new and self._study.get_trials(deepcopy=False)):
            raise CalmError(f"study {name!r} is not one of calm tune", USAGE)
        if is_new:
            self._study.set_user_attr(_IDENTITY, json.dumps(identity))
        # Another worker may have set it at the same time.
        found = json.loads(self._study.user_attrs[_IDENTITY])
        for key, own in identity.items():
            if found.get(key) != own:
                theirs, ours = (
                    " ".join(each) if isinstance(each, list) else each for each in (found.get(key), own)
                )
                raise CalmError(f"study {name!r} is of another {key}: {theirs}, and not {ours}", USAGE)

    def parameters(self, setting: Setting) -> dict[str, Any] | None:
        """A setting as the optimizer has it; None if this machine cannot run it."""
        knobs = self.spaces.get(setting.allocator)
        if knobs is None or any(value not in knobs.get(name, ()) for name, value in setting.values.items()):
            return None
        found: dict[str, Any] = {"allocator": setting.allocator}
        for name, values in knobs.items():
            key = f"{setting.allocator}/{name}"
            found[key] = name in setting.values
            if found[key]:
                found[f"{key}/value"] = values.index(setting.values[name])
        return found

    def enqueue(self, setting: Setting) -> None:
        """Has it tried after what is enqueued already; one that is not in the space is skipped."""
        if (parameters := self.parameters(setting)) is not None:
            self._study.enqueue_trial(parameters)

    def ask(self) -> Asked:
        """The next setting to try; never glibc's defaults, which are the baseline."""
        while True:
            trial = self._study.ask()
            try:
                name = str(trial.suggest_categorical("allocator", list(self.spaces)))
                chosen = {}
                for knob, values in self.spaces[name].items():
                    if trial.suggest_categorical(f"{name}/{knob}", [False, True]):
                        last = len(values) - 1
                        index = trial.suggest_int(f"{name}/{knob}/value", 0, last) if last else 0
                        chosen[knob] = values[index]
            except ValueError as error:
                raise CalmError(f"the study has another search space than this machine: {error}") from error
            asked = Asked(trial, Setting(name, chosen))
            for key, value in {"setting": asdict(asked.setting), **self.machine}.items():
                trial.set_user_attr(key, value)
            if asked.setting != Setting(GLIBC):
                return asked
            self.tell(asked, [])

    def tell(self, asked: Asked, pairs: Sequence[Pair], failure: str | None = None) -> None:
        """Ends the trial: gives the optimizer the logarithms of the ratios, or fails the trial without pairs.

        With `failure` the program failed under the setting.
        """
        if failure:
            asked.trial.set_user_attr("failure", failure)
        if pairs:
            asked.trial.set_user_attr("pairs", [asdict(pair) for pair in pairs])
            _, *ratios = Tried(asked.setting, list(pairs)).point
            self._study.tell(asked.trial, [math.log(ratio) for ratio in ratios])
        else:
            self._study.tell(asked.trial, state=self._optuna.trial.TrialState.FAIL)

    def tried(self) -> dict[Setting, Tried]:
        """What is known of every setting, by all workers together."""
        found: dict[Setting, Tried] = {}
        for attributes in (trial.user_attrs for trial in self._study.get_trials(deepcopy=False)):
            if attributes.keys() & {"pairs", "failure"}:
                setting = msgspec.convert(attributes["setting"], Setting)
                each = found.setdefault(setting, Tried(setting))
                each.pairs += msgspec.convert(attributes.get("pairs", []), list[Pair])
                each.failure = each.failure or attributes.get("failure")
                each.machines = sorted({*each.machines, *filter(None, [attributes.get("machine")])})
        return found


def allocators_of(storage: "optuna.storages.RDBStorage", name: str) -> list[str] | None:
    """The allocators that a study searches, if it exists."""
    import optuna

    try:
        found = optuna.load_study(study_name=name, storage=storage).user_attrs[_IDENTITY]
    except KeyError:
        return None
    return [str(each) for each in json.loads(found)["allocators"]]
