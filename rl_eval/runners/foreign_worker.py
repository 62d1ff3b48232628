"""Environments of a slot in another interpreter. This file runs there alone, without a package of rl_eval.

It needs Python 3.6 or newer, and NumPy only for arrays. The runner puts its source on the command line, and imports
:func:`dumps` and :func:`loads` from it for its own side. Requests and replies are frames on the two ends of a socket
pair: JSON, followed by the bytes of all arrays. The length of a frame is sent as multiprocessing's ``Connection`` does.
"""

import functools
import importlib
import inspect
import json
import os
import random
import re
import select
import signal
import struct
import sys
import threading
import time
import traceback
from typing import IO, Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

MOST_BYTES = 2**28
"""Longest frame."""
_HEAD = struct.Struct("<I")
LENGTH = struct.Struct("!i")
"""Number of bytes of a frame, before it."""
_KINDS = "biufcSU"
"""Kinds of dtypes that a frame can have."""
_PLAIN = {"|b1": "?", "|i1": "b", "|u1": "B", "<i2": "<h", "<u2": "<H", "<i4": "<i", "<u4": "<I", "<i8": "<q"}
_PLAIN.update({"<u8": "<Q", "<f4": "<f", "<f8": "<d"})
"""Formats of ``struct`` for the scalars that can be read without NumPy, by dtype."""
_KEYWORDS = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
_CONTEXTS = ("config", "context", "env_config")
"""Names that mark a first parameter as the context, even if it has a default or is one of the arguments."""
SPACES = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple", "Text")
_DEATH_SIGNAL = 1
"""Linux: PR_SET_PDEATHSIG."""
_LAST_CLOSE_S = 1.0
"""Time for the environments' ``close`` after the runner has gone, in seconds."""
_LOOK_S = 0.5


# ---------------------------------------------------------------------------------------------------- frames


def dumps(value: Any) -> bytes:
    """Return a value as the bytes of a frame.

    Raises:
        TypeError: The value contains something that is neither plain data nor an array of numbers or texts.
    """
    parts: List[bytes] = []
    try:
        head = json.dumps(_described(value, parts)).encode()
    except RecursionError:
        raise TypeError("a value that contains itself cannot be sent") from None
    data = b"".join([_HEAD.pack(len(head)), head, *parts])
    if len(data) > MOST_BYTES:
        raise TypeError("a value of %d bytes cannot be sent: a frame has at most %d" % (len(data), MOST_BYTES))
    return data


def _described(item: Any, parts: List[bytes]) -> Any:
    kind = type(item)
    if item is None or kind in (bool, int, float, str):
        return item
    if kind is list:
        return [_described(each, parts) for each in item]
    if isinstance(item, tuple):
        return {"t": [_described(each, parts) for each in item]}
    if isinstance(item, dict):
        return {"d": [[_described(key, parts), _described(each, parts)] for key, each in item.items()]}
    if kind is bytes:
        parts.append(item)
        return {"b": len(item)}
    dtype: Any = getattr(item, "dtype", None)
    if getattr(dtype, "kind", "O") in _KINDS and hasattr(item, "tobytes"):
        data = item.tobytes()
        parts.append(data)
        return {"a": [dtype.str, list(item.shape), len(data), hasattr(item, "__setitem__")]}
    raise TypeError("a %s cannot be sent" % (kind.__name__ if dtype is None else "%s of %s" % (kind.__name__, dtype)))


def loads(data: Any) -> Any:
    """Return the value of a frame.

    Raises:
        ValueError: The bytes are not a frame.
    """
    try:
        (size,) = _HEAD.unpack(data[: _HEAD.size])
        rest = memoryview(data)[_HEAD.size + size :]
        place = [0]
        value = _read(json.loads(bytes(data[_HEAD.size : _HEAD.size + size]).decode()), rest, place)
    except Exception as error:
        raise ValueError("%s: %s" % (type(error).__name__, error)) from error
    if len(data) < _HEAD.size + size:
        raise ValueError("the frame ends in its head")
    if place[0] != len(rest):
        raise ValueError("the frame has %d bytes after its arrays" % (len(rest) - place[0]))
    return value


def _read(item: Any, rest: Any, place: List[int]) -> Any:
    if isinstance(item, list):
        return [_read(each, rest, place) for each in item]
    if not isinstance(item, dict):
        return item
    ((kind, given),) = item.items()
    if kind == "d":
        return {_read(key, rest, place): _read(each, rest, place) for key, each in given}
    if kind == "t":
        return tuple([_read(each, rest, place) for each in given])
    if kind not in ("a", "b"):
        raise ValueError("unknown kind %r" % kind)
    size = given if kind == "b" else given[2]
    if not 0 <= size <= len(rest) - place[0]:
        raise ValueError("the frame ends before its arrays")
    part = rest[place[0] : place[0] + size]
    place[0] += size
    return bytes(part) if kind == "b" else _array(part, given[0], given[1], given[3])


def _array(part: Any, dtype: str, shape: List[int], is_array: bool) -> Any:
    try:
        import numpy
    except ImportError:
        if is_array:
            raise ValueError("an array came, but this interpreter has no NumPy: install it there") from None
        return struct.unpack(_PLAIN[dtype], part)[0]
    found = numpy.dtype(dtype)
    if found.kind not in _KINDS:
        raise ValueError("the dtype %s is refused" % dtype)
    array = numpy.frombuffer(part, found).reshape(shape) if found.itemsize else numpy.zeros(shape, found)
    return array.copy() if is_array else array[()]


# ---------------------------------------------------------------------------------------------------- environments


class EnvContext(dict):  # type: ignore[type-arg]
    """Argument of a function that builds an environment; see ``rl_eval.EnvContext``."""

    def __init__(self, kwargs: Dict[str, Any], fields: Dict[str, Any]) -> None:
        super().__init__(kwargs)
        self.__dict__.update(fields)


def build(where: Dict[str, Any]) -> Any:
    """Build an environment from its name, with its wrappers."""
    name = where["env"]
    if ":" not in name or "/" in name or re.fullmatch(where["ids"], name):
        env = _registered(name, where["env_kwargs"])
    else:
        env = _called(_imported(name), where["env_kwargs"], where["context"])
    for wrapper in where["wrappers"]:
        kwargs = dict(wrapper)
        env = _imported(kwargs.pop("wrapper"))(env, **kwargs)
    return env


def _registered(name: str, kwargs: Dict[str, Any]) -> Any:
    """Build an environment from the registry of gymnasium; if it does not have the id, from the registry of gym."""
    problem: Exception = ImportError("neither gymnasium nor gym can be imported")
    for library in ("gymnasium", "gym"):
        try:
            gym = importlib.import_module(library)
        except ImportError:
            continue
        unchecked = {"disable_env_checker": True} if "disable_env_checker" in _parameters(gym.make) else {}
        try:
            return gym.make(name, **dict(unchecked, **kwargs))
        except gym.error.Error as error:
            problem = error
    raise problem


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def _parameters(function: Any) -> Dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # Some callables hide their signature.
        return {}


def _called(factory: Any, kwargs: Dict[str, Any], fields: Dict[str, Any]) -> Any:
    """Call a factory with arguments, and with the context if it has a parameter for one."""
    parameters = _parameters(factory)
    receiver = context_parameter(parameters.values(), kwargs, inspect.isclass(factory))
    if receiver is None:
        return factory(**kwargs)
    name = receiver.name
    if name in kwargs or receiver is not next(iter(parameters.values())):
        return factory(**dict(kwargs, **{name: EnvContext(kwargs.get(name, kwargs), fields)}))
    named = {
        one.name: kwargs[one.name] for one in parameters.values() if one.kind is one.KEYWORD_ONLY and one.name in kwargs
    }
    return factory(EnvContext(kwargs, fields), **named)


def context_parameter(
    parameters: Iterable[inspect.Parameter], kwargs: Any, is_class: bool
) -> Optional[inspect.Parameter]:
    """Return the parameter for the context, or None. Any other parameter keeps its default.

    An environment class has its own arguments. So its first parameter must have one of the names in :data:`_CONTEXTS`,
    and no default.
    """
    annotated = [one for one in parameters if "EnvContext" in str(one.annotation)]
    first = next(iter(parameters), None)
    if annotated or first is None or first.kind in _KEYWORDS:
        return next(iter(annotated), None)
    named, required = first.name in _CONTEXTS, first.default is first.empty and first.name not in kwargs
    required = required and "num_envs" not in kwargs  # The parameter is more likely to be the number of slots.
    return first if (named and required if is_class else named or required) else None


def _chain(env: Any) -> Iterator[Any]:
    """Yield an environment and those that it wraps, the outermost first."""
    while env is not None:
        yield env
        env = vars(env).get("env") if hasattr(env, "__dict__") else None


def attribute(env: Any, name: str) -> Any:
    """Return an attribute of an environment or of one that it wraps; None if there is none."""
    return next((getattr(one, name) for one in _chain(env) if hasattr(one, name)), None)


def facts(env: Any, where: Dict[str, Any]) -> Dict[str, Any]:
    """Return the facts of an environment that the runner reads without a call."""
    limits = [
        one._max_episode_steps for one in _chain(env) if isinstance(getattr(one, "_max_episode_steps", None), int)
    ]
    metadata = attribute(env, "metadata")
    keys = attribute(env, "condition_keys")
    return {
        "observation_space": describe_space(attribute(env, "observation_space"), "observation_space"),
        "action_space": describe_space(attribute(env, "action_space"), "action_space"),
        "render_mode": attribute(env, "render_mode"),
        "metadata": _sendable(metadata) if isinstance(metadata, dict) else {},
        "condition_keys": None if keys is None else list(keys),
        "time_limit": min(limits) if limits else None,
        "name": type(getattr(env, "unwrapped", env)).__name__,
        "learning": _learning(env, where["learning"]),
        "provenance": dict(versions(env, where["env"]), seeded_by=seeded_by(env)),
    }


def seeded_by(env: Any) -> str:
    """Return the method that takes a seed: ``reset`` of the innermost environment, or a ``seed``; else ``neither``."""
    takes = _parameters(getattr(env, "unwrapped", env).reset).values()
    if any(one.name == "seed" or one.kind is one.VAR_KEYWORD for one in takes):
        return "reset"
    return "seed" if _seed_methods(env) else "neither"


def _seed_methods(env: Any) -> List[Any]:
    """Return the methods ``seed``, without those of gym's base classes: they do nothing, or call the next one."""
    found = [getattr(one, "seed", None) for one in _chain(env)]
    return [one for one in found if callable(one) and getattr(one, "__module__", "") != "gym.core"]


def _learning(env: Any, flags: Dict[str, str]) -> Optional[Tuple[str, str]]:
    """Return the class name of a wrapper that updates its statistics, and the attribute that freezes it."""
    for one in _chain(env):
        names = ["%s:%s" % (base.__module__, base.__qualname__) for base in type(one).__mro__]
        flag = next((flags[name] for name in names if name in flags), "")
        if flag and getattr(one, flag, True):
            return type(one).__name__, flag
    return None


def describe_space(space: Any, path: str) -> List[Any]:
    """Return a space as the name of its class and its arguments; for another class, its name and the path."""
    kind = next((one.__name__ for one in type(space).__mro__ if one.__name__ in SPACES), "")
    if kind == "Box":
        return [kind, {"low": space.low, "high": space.high, "dtype": space.low.dtype.str}]
    if kind == "Discrete":
        return [kind, {"n": int(space.n), "start": int(getattr(space, "start", 0))}]
    if kind == "MultiDiscrete":
        return [kind, {"nvec": space.nvec, "start": getattr(space, "start", None), "dtype": space.nvec.dtype.str}]
    if kind == "MultiBinary":
        return [kind, {"n": space.n if isinstance(space.n, int) else [int(one) for one in space.n]}]
    if kind == "Dict":
        return [kind, {key: describe_space(one, "%s[%r]" % (path, key)) for key, one in space.spaces.items()}]
    if kind == "Tuple":
        return [kind, [describe_space(one, "%s[%d]" % (path, place)) for place, one in enumerate(space.spaces)]]
    if kind == "Text":
        given = {"min_length": space.min_length, "max_length": space.max_length}
        return [kind, dict(given, charset="".join(sorted(space.character_set)))]
    return [type(space).__name__, path]


def versions(env: Any, name: str) -> Dict[str, str]:
    """Return the version of the interpreter, and those of the packages of an environment and of those that it wraps."""
    found = {"python": sys.version.split()[0]}
    packages = [re.split("[.:/]", one)[0] for one in (name, *(type(one).__module__ for one in _chain(env)))]
    for package in ("gymnasium", "gym", "numpy", *packages):
        version = _installed(package) or getattr(sys.modules.get(package), "__version__", None)
        if isinstance(version, str):
            found[package] = version
    return found


@functools.lru_cache(None)
def _installed(package: str) -> Optional[str]:
    try:
        metadata = importlib.import_module("importlib.metadata")  # Python 3.8 or newer.
        return str(metadata.version(package))
    except Exception:
        return None


class Sensor:
    """Detector of an environment that changes a global random generator; see ``rl_eval.records.generators``."""

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._calls = 0
        self._knows_reset = False

    def call(self, method: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``reset`` or ``step``. Compare the generators around the calls 1, 2, 4, 8 and so on."""
        self._calls += 1
        if self._calls & (self._calls - 1) and (self._knows_reset or method != "reset"):
            return function(*args, **kwargs)
        modules, before = len(sys.modules), _generators()
        result = function(*args, **kwargs)
        if len(sys.modules) == modules:  # Modules may seed when they are imported.
            self._knows_reset = self._knows_reset or method == "reset"
            for name, state in _generators().items():
                if before.get(name, state) != state:
                    self._report("%s() changes %s" % (method, name))
        return result


def _generators() -> Dict[str, Any]:
    """Return the state of each global random generator, by the name of the generator."""
    states: Dict[str, Any] = {"Python's global generator": random.getstate()}
    if "numpy" in sys.modules:
        parts = sys.modules["numpy"].random.get_state()
        states["numpy's global generator"] = [getattr(one, "tobytes", one.__repr__)() for one in parts]
    if "torch" in sys.modules:
        states["torch's global generator"] = sys.modules["torch"].get_rng_state().numpy().tobytes()
    return states


def reset(env: Any, seeded: str, arguments: Dict[str, Any], call: Callable[..., Any]) -> Tuple[Any, Dict[str, Any]]:
    """Reset an environment of gymnasium or gym, which is seeded by ``seeded``; return the observation and the info."""
    if seeded == "seed":
        rest = dict(arguments)
        call("reset", _seed_methods(env)[0], rest.pop("seed") % 2**31)
        found = call("reset", env.reset, **rest)
    else:
        found = call("reset", env.reset, **arguments)
    has_info = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)
    return (found[0], found[1]) if has_info else (found, {})


def step(env: Any, action: Any, call: Callable[..., Any]) -> Tuple[Any, ...]:
    """Step an environment of gymnasium or gym. With gym's four values, the info says why it ended."""
    found = tuple(call("step", env.step, action))
    if len(found) != 4:
        return found
    observation, reward, done, info = found
    cut = bool(done) and bool(info.get("TimeLimit.truncated", False))
    return observation, reward, bool(done) and not cut, cut, info


# ---------------------------------------------------------------------------------------------------- requests


class Slot:
    """Environments of a slot, by number: the usual one and, while an episode needs a new environment, this new one.

    Args:
        where: Description of the environment.
        send: Sends a reply: number, phase, value, error, traceback and seconds.
    """

    def __init__(self, where: Any, send: Callable[[Tuple[Any, ...]], None]) -> None:
        self._where, self._send = where, send
        self._envs: Dict[int, Any] = {}
        self._seeded = ""
        """Result of :func:`seeded_by` for the last environment."""
        self._sensor: Any = Sensor(lambda change: send((0, "sensed", change, None, "", 0.0)))

    def answer(self, number: int, kind: str, env: int, *args: Any) -> None:
        """Execute a request and send the reply."""
        started, phase = time.perf_counter(), kind
        try:
            if kind == "close":
                self.close(env)
                self._send((number, "closed", None, None, "", 0.0))
                return
            if kind != "step" and env not in self._envs:
                phase = "construct"
                self._envs[env], found = self._constructed()
                self._send((number, "made", (env, found), None, "", time.perf_counter() - started))
            started, phase = time.perf_counter(), "reset" if kind == "begin" else kind
            value = getattr(self, "_" + kind)(self._envs[env], *args)
            self._send((number, phase, value, None, "", time.perf_counter() - started))
        except BaseException as error:
            self._send((number, phase, None, *self._explained(error), time.perf_counter() - started))

    def close(self, env: int) -> None:
        """Close an environment if it exists; ignore an error of its ``close``."""
        try:
            if env in self._envs:
                self._envs.pop(env).close()
        except BaseException:
            pass

    def close_all(self) -> None:
        """Close all environments."""
        for env in list(self._envs):
            self.close(env)

    def _constructed(self) -> Tuple[Any, Dict[str, Any]]:
        """Return a new environment and its facts."""
        env = build(self._where)
        found = facts(env, self._where)
        self._seeded = found["provenance"]["seeded_by"]
        return env, found

    def _explained(self, error: BaseException) -> Tuple[Any, str]:
        """Return an error and its traceback, in a form that can be sent."""
        text = "%s: %s" % (type(error).__name__, error)
        if isinstance(error, ImportError):
            text += " (in %s: install it there, or add its folder to environment.python_path)" % sys.executable
        return text, traceback.format_exc()[-20000:]

    def _build(self, env: Any) -> None:
        """Do nothing: the environment was built before."""

    def _begin(self, env: Any, position: int, seed: int, attempt: int, arguments: Dict[str, Any]) -> Any:
        hook = attribute(env, "begin_episode")
        if callable(hook):
            hook(position, seed, attempt)
        return _with_sendable_info(reset(env, self._seeded, arguments, self._sensor.call))

    def _step(self, env: Any, action: Any) -> Any:
        return _with_sendable_info(step(env, action, self._sensor.call))

    def _get(self, env: Any, name: str) -> Any:
        return attribute(env, name)

    def _render(self, env: Any) -> Any:
        return env.render()


def _sendable(values: Dict[Any, Any]) -> Dict[Any, Any]:
    """Return the items that a frame can have."""
    try:
        dumps(values)
    except TypeError:
        parts = [] if len(values) == 1 else [_sendable(dict([one])) for one in values.items()]
        return {key: value for part in parts for key, value in part.items()}
    return values


def _with_sendable_info(result: Tuple[Any, ...]) -> Tuple[Any, ...]:
    return (*result[:-1], _sendable(result[-1])) if isinstance(result[-1], dict) else result


# ---------------------------------------------------------------------------------------------------- the process


def end_with(parent: int, inward: Optional[int] = None) -> None:
    """Exit when the runner has gone, even while an environment is busy.

    Args:
        parent: Id of the parent process.
        inward: File descriptor whose hang-up says the same: behind a wrapper such as ``sh -c``, the parent is not the
            runner. The process then has a moment to close its environments.
    """
    if "main" in sys.argv:
        # The signal comes when the starting thread exits. Only the main thread lives as long as its process.
        try:
            import ctypes

            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        except (ImportError, OSError, AttributeError):
            pass

    def watch() -> None:
        poll = select.poll()
        if inward is not None:
            poll.register(inward, 0)
        while os.getppid() == parent and not poll.poll(_LOOK_S * 1000):
            pass
        time.sleep(0.0 if inward is None else _LAST_CLOSE_S)
        os._exit(1)

    threading.Thread(target=watch, name="rl_eval parent watch", daemon=True).start()


def _read_frame(inward: IO[bytes]) -> bytes:
    (size,) = LENGTH.unpack(_exactly(inward, LENGTH.size))
    return _exactly(inward, size)


def _exactly(inward: IO[bytes], count: int) -> bytes:
    data = inward.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _write(outward: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(outward, rest) :]


def main() -> None:
    """Answer requests of the runner until it has gone. Argument: the mark that precedes the first frame, as hex."""
    inward, outward, process = os.fdopen(os.dup(0), "rb"), os.dup(1), os.getpid()
    os.dup2(2, 1)  # What the simulator prints does not go to the frames.
    sys.stdout = sys.stderr
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the runner's process, which ends this one.
    end_with(os.getppid(), inward.fileno())
    _write(outward, bytes.fromhex(sys.argv[1]))
    if hasattr(os, "register_at_fork"):
        # A process that the environment starts must not keep the pipe open: the runner waits until it is closed.
        os.register_at_fork(after_in_child=functools.partial(os.closerange, inward.fileno(), outward + 1))

    def send(reply: Any) -> None:
        if os.getpid() != process:  # A process that the environment has forked must not answer.
            os._exit(1)
        data = dumps(reply)
        _write(outward, LENGTH.pack(len(data)) + data)

    slot = None
    try:
        sys.path[:0] = loads(_read_frame(inward))  # NumPy may be there, and what follows may contain arrays.
        where = loads(_read_frame(inward))
        slot = Slot(where, send)
        try:
            importlib.import_module(where["module"])
        except Exception:
            pass  # The construction raises it again.
        send((0, "started", None, None, "", 0.0))
        while True:
            slot.answer(*loads(_read_frame(inward)))
    except (EOFError, OSError):
        if slot is not None:
            slot.close_all()
    os._exit(0)


if __name__ == "__main__":
    main()
