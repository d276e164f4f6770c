"""The optimizer, and where it keeps what was tried: optuna's multi-objective TPE, in memory or in a database.

Each allocator has parameters of its own; a knob has one that says whether it is set, and, only if so, one for
the value: its place in the knob's order. What is kept are ratios to a baseline that ran on the same machine
at the same time, so that several machines can share a study.
"""

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from calm.allocators import GLIBC
from calm.errors import USAGE, CalmError
from calm.tune.space import Setting, Space
from calm.tune.trial import Look

if TYPE_CHECKING:
    import optuna

_IDENTITY = "calm tune"
_STARTUP = 12
# What the case studies and manuals say is worth a look comes first, the plain allocators before all.
_KNOWN_GOOD: tuple[dict[str, str], ...] = (
    {"glibc.malloc.trim_threshold": str(32 << 20)},
    {"glibc.malloc.trim_threshold": str(2 << 20)},
    {"glibc.malloc.trim_threshold": str(1 << 30), "glibc.malloc.mmap_threshold": str(32 << 20)},
    {"glibc.malloc.top_pad": str(16 << 20)},
    {"glibc.malloc.arena_max": "1"},
    {"glibc.malloc.tcache_count": "127"},
)
_T = TypeVar("_T")


class StudyLostError(CalmError):
    """The database went away in the middle."""


@dataclass
class Tried:
    """All that the search knows about one setting."""

    setting: Setting
    looks: list[Look] = field(default_factory=list)
    failure: str | None = None
    machines: set[str] = field(default_factory=set)

    @property
    def time(self) -> float:
        """Geometric mean of the ratios."""
        return math.exp(sum(math.log(look.time) for look in self.looks) / len(self.looks))

    @property
    def memory(self) -> float:
        """Geometric mean of the ratios."""
        return math.exp(sum(math.log(look.memory) for look in self.looks) / len(self.looks))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.setting.as_dict(),
            "failure": self.failure,
            "looks": [vars(look) for look in self.looks],
            "machines": sorted(self.machines),
        }


@dataclass(frozen=True)
class Asked:
    """A setting that the optimizer wants to know about."""

    trial: "optuna.Trial"
    setting: Setting


def shown_url(url: str) -> str:
    """The address of a database without its password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return url.partition(":")[0] + ":…"
    secret = [name for name in parsed.query if "pass" in name.lower()]
    return parsed.difference_update_query(secret).render_as_string(hide_password=True)


def _full_url(url: str) -> str:
    """With the driver that calmalloc[fleet] installs, where none is named."""
    scheme, separator, rest = url.partition("://")
    return f"postgresql+psycopg://{rest}" if separator and scheme in ("postgres", "postgresql") else url


def _told(url: str, error: BaseException) -> str:
    """What a database complains of: its first line, and no password."""
    from sqlalchemy.engine import make_url

    while error.__cause__ is not None:
        error = error.__cause__
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    parsed = make_url(_full_url(url))
    words = [str(value) for name, value in parsed.query.items() if "pass" in name.lower()]
    for secret in (*words, parsed.password):
        text = text.replace(str(secret), "***") if secret else text
    return text


@dataclass(frozen=True)
class Storage:
    """A database that is there."""

    url: str
    database: "optuna.storages.RDBStorage"


def open_storage(url: str) -> Storage:
    """Connects, and makes the tables where there are none."""
    import optuna
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

    full = _full_url(url)
    for attempt in range(10):
        try:
            return Storage(url, optuna.storages.RDBStorage(full, engine_kwargs={"pool_pre_ping": True}))
        except (ArgumentError, NoSuchModuleError, ValueError) as error:
            raise CalmError(
                f"--storage {shown_url(url)}: not the URL of a database, such as sqlite:///tune.db or "
                "postgresql://user@host/base",
                USAGE,
            ) from error
        except ImportError as error:
            remedy = "a driver that has to be installed"
            if full.startswith("postgresql+psycopg:"):
                remedy = "psycopg: pip install 'calmalloc[fleet]'"
            raise CalmError(f"--storage {shown_url(url)} needs {remedy}", USAGE) from error
        except SQLAlchemyError as error:
            # Two workers that make the tables at once: one of them is told that they are there.
            if attempt < 9 and ("already exists" in str(error) or "UNIQUE" in str(error).upper()):
                time.sleep(0.2 * (attempt + 1))
                continue
            raise CalmError(f"--storage {shown_url(url)}: {_told(url, error)}") from error
    raise AssertionError


class Study:
    """Asks the optimizer for settings and tells it what they took."""

    def __init__(
        self,
        spaces: Sequence[Space],
        *,
        seed: int | None = None,
        storage: Storage | None = None,
        name: str | None = None,
        identity: Mapping[str, Any] | None = None,
        machine: Mapping[str, str] | None = None,
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        self._optuna = optuna
        self._spaces = {space.allocator: space for space in spaces}
        self._url = storage.url if storage else None
        self.machine = dict(machine or {})
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=_STARTUP,
            multivariate=True,
            group=True,
            constant_liar=storage is not None,
            seed=seed,
        )
        self._study = self._reach(
            lambda: optuna.create_study(
                directions=["minimize", "minimize"],
                sampler=sampler,
                storage=storage.database if storage else None,
                study_name=name,
                load_if_exists=storage is not None,
            )
        )
        if identity is not None:
            self._agree(dict(identity), name or "")
        if not self._reach(lambda: self._study.get_trials(deepcopy=False)):
            self._enqueue_known()

    def _reach(self, action: Callable[[], _T]) -> _T:
        """Does what the database may refuse."""
        if self._url is None:
            return action()
        from sqlalchemy.exc import SQLAlchemyError

        try:
            return action()
        except (SQLAlchemyError, self._optuna.exceptions.StorageInternalError) as error:
            raise StudyLostError(f"--storage {shown_url(self._url)}: {_told(self._url, error)}") from error

    def _agree(self, identity: dict[str, Any], name: str) -> None:
        """Joins the study only if it is about the same thing."""
        text = json.dumps(identity, sort_keys=True)
        if len(self._reach(lambda: self._study.directions)) != 2:
            raise CalmError(f"study {name!r} is not one of calm tune", USAGE)
        there = self._reach(lambda: self._study.user_attrs)
        if _IDENTITY not in there:
            if self._reach(lambda: self._study.get_trials(deepcopy=False)):
                raise CalmError(f"study {name!r} is not one of calm tune", USAGE)
            self._reach(lambda: self._study.set_user_attr(_IDENTITY, text))
            there = self._reach(lambda: self._study.user_attrs)
        found = json.loads(there[_IDENTITY])
        for key, own in identity.items():
            if found.get(key) != own:
                raise CalmError(
                    f"study {name!r} is of another {key}: {_plain(found.get(key))}, and not {_plain(own)}",
                    USAGE,
                )

    def _parameters(self, setting: Setting) -> dict[str, Any] | None:
        """As the optimizer has them; None if the setting is not in the space."""
        space = self._spaces.get(setting.allocator)
        if space is None:
            return None
        values = dict(setting.values)
        if not set(values) <= {knob.name for knob in space.knobs}:
            return None
        found: dict[str, Any] = {"allocator": setting.allocator}
        for knob in space.knobs:
            found[f"{space.allocator}/{knob.name}"] = knob.name in values
            if knob.name in values:
                if values[knob.name] not in knob.values:
                    return None
                found[f"{space.allocator}/{knob.name}/value"] = knob.values.index(values[knob.name])
        return found

    def runnable(self, setting: Setting) -> bool:
        """Whether this machine has what another one tried."""
        return self._parameters(setting) is not None

    @property
    def spaces(self) -> list[Space]:
        """What is searched."""
        return list(self._spaces.values())

    def beyond(self, setting: Setting, name: str, upwards: bool) -> list[str]:
        """The values of a knob further on than the setting's, the nearest first."""
        knob = next(knob for knob in self._spaces[setting.allocator].knobs if knob.name == name)
        place = knob.values.index(dict(setting.values)[name])
        return list(knob.values[place + 1 :] if upwards else reversed(knob.values[:place]))

    def _enqueue_known(self) -> None:
        plain = [Setting(name) for name in self._spaces if name != GLIBC]
        known = [Setting(GLIBC, tuple(each.items())) for each in _KNOWN_GOOD]
        for setting in [*plain, *known]:
            self.enqueue(setting)

    def enqueue(self, setting: Setting) -> None:
        """Has it tried after what is enqueued already; one that is not in the space is passed over."""
        if (parameters := self._parameters(setting)) is not None:
            self._reach(lambda: self._study.enqueue_trial(parameters))

    def ask(self) -> Asked:
        """The next setting to try. Never glibc as it comes, which is the baseline."""
        while True:
            asked = self._reach(self._ask)
            if asked.setting != Setting(GLIBC):
                return asked
            self._finish(asked, "the baseline itself")

    def _ask(self) -> Asked:
        trial = self._study.ask()
        try:
            name = str(trial.suggest_categorical("allocator", list(self._spaces)))
            space = self._spaces[name]
            values = []
            for knob in space.knobs:
                if trial.suggest_categorical(f"{name}/{knob.name}", [False, True]):
                    most = len(knob.values) - 1
                    place = trial.suggest_int(f"{name}/{knob.name}/value", 0, most) if most else 0
                    values.append((knob.name, knob.values[place]))
        except ValueError as error:
            raise CalmError(f"the study has another search space than this machine: {error}") from error
        setting = Setting(name, tuple(values))
        trial.set_user_attr("setting", setting.as_dict())
        for key, value in self.machine.items():
            trial.set_user_attr(key, value)
        return Asked(trial, setting)

    def tell(self, asked: Asked, looks: Sequence[Look]) -> None:
        """The objectives are the logarithms of the ratios."""
        trial = asked.trial
        self._reach(lambda: trial.set_user_attr("looks", [[look.time, look.memory] for look in looks]))
        mean = Tried(asked.setting, list(looks))
        values = [math.log(mean.time), math.log(mean.memory)]
        self._reach(lambda: self._study.tell(trial, values))

    def fail(self, asked: Asked, failure: str) -> None:
        """The program failed under the setting."""
        self._reach(lambda: asked.trial.set_user_attr("failure", failure))
        self._finish(asked, failure)

    def give_up(self, asked: Asked) -> None:
        """The trial was stopped: nothing is known of the setting."""
        self._finish(asked, "stopped")

    def _finish(self, asked: Asked, why: str) -> None:
        self._reach(lambda: asked.trial.set_user_attr("ended", why))
        state = self._optuna.trial.TrialState.FAIL
        self._reach(lambda: self._study.tell(asked.trial, state=state))

    def tried(self) -> dict[Setting, Tried]:
        """What is known of every setting, by all workers together."""
        found: dict[Setting, Tried] = {}
        for trial in self._reach(lambda: self._study.get_trials(deepcopy=False)):
            attributes = trial.user_attrs
            if "setting" not in attributes or not ("looks" in attributes or "failure" in attributes):
                continue
            setting = Setting.from_dict(attributes["setting"])
            each = found.setdefault(setting, Tried(setting))
            each.looks += [Look(*pair) for pair in attributes.get("looks", ())]
            each.failure = each.failure or attributes.get("failure")
            each.machines |= {attributes["machine"]} if "machine" in attributes else set()
        return found


def _plain(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def allocators_of(storage: Storage, name: str) -> list[str] | None:
    """The allocators that a study searches, if it is there already."""
    import optuna

    try:
        found = optuna.load_study(study_name=name, storage=storage.database).user_attrs.get(_IDENTITY)
    except KeyError:
        return None
    return [str(each) for each in json.loads(found).get("allocators", [])] if found else None
