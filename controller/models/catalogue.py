"""The models there are, their names, ids and versions.

A model has a public name, which clients use, and an id, which the scheduler and the workers use. They
are the same for the first model of a name. A model that takes the name over gets a new id (`NAME@2`). So
the old one serves until the new one is ready, and nothing that is still under way for the old one can be
mistaken for the new one's.

A folder may say that several versions are served at once. Each is an entry, with ids of its own (`NAME:2`, `NAME:2@2`), and to
the scheduler a model of its own. `controller.models.versions` says which of them a request gets.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from clockwright.errors import ModelError, NoRoomError, Refusal, RefusedError, UnknownModelError
from clockwright.units import NS_PER_S, ModelId
from clockwright.wire.tensors import describe
from controller.core.events import ModelAdded, ModelPinned, ModelRemoved
from controller.models.digests import FileDigests
from controller.models.entry import Entry, ModelState, Pipeline
from controller.models.model_folder import ModelFolder, check_name, read_versions
from controller.models.state_file import StateFile
from controller.models.uploads import Upload, Uploads
from controller.models.verdicts import OFFERS_SLICE, Verdicts
from controller.models.versions import LATEST, Routing, Versions
from controller.runtime import Runtime

log = logging.getLogger(__name__)

# A replaced model serves its last requests for this long at most. A request may have an SLO of hours.
RETIRE_LIMIT_S = 10

# Instances of a folder that clients may upload. Each is offered to each worker and waits for its verdict.
UPLOADED_COPIES_MAX = 1000
#: Models in all, those on trial too; a scheduler with more of them was never tried.
MODELS_MAX = 100_000

# Names without a model whose last generation is remembered one by one.
_NAMES_GONE_MAX = 10_000

# Between a name and a version, and between these and a generation. No name has one, so an id is never another model's name.
_VERSION_SEPARATOR, _SEPARATOR = ":", "@"


_Said = tuple[Routing | None, Routing | None]


class ServedNames(Verdicts):
    """Which models are served by which public names, and which versions requests get."""

    def __init__(self, runtime: Runtime, state: StateFile | None) -> None:
        super().__init__(runtime)
        self._state = state
        #: Models that are served, by key: by public name, but for those in `_versions`.
        self._by_key: dict[str, Entry] = {}
        #: By public name: models of which several versions may be served, or whose version may be named by an alias.
        self._versions: dict[str, Versions[Entry]] = {}
        #: By public name: what an operator has said of its versions (None: what its folder says holds), and what held before.
        self._routings: dict[str, _Said] = {}
        self._saying = asyncio.Lock()
        #: Public names of models that operators have pinned, whether there is one just now or not.
        self._pinned: set[str] = set()
        #: Names of models that are being added or replaced.
        self._busy: set[str] = set()
        #: Names of applications, which share the models' name space.
        self._reserved: set[str] = set()

    def find(self, name: str, version: str = "") -> Entry | None:
        """Find the model that serves a public name: a version or alias, or what most requests that name none get."""
        if (versions := self._versions.get(name)) is not None:
            return versions.find(version, self._ready(versions))
        model = self._by_key.get(name)
        is_it = model is not None and version in ("", LATEST, model.version)
        return model if is_it else None

    def member(self, name: str) -> Entry | None:
        """Find what serves a public name; a pipeline takes in its models as they are now."""
        model = self.find(name)
        if isinstance(model, Pipeline):
            self.look_at(model)
        return model

    def versions(self, name: str) -> list[Entry]:
        """All versions of a public name, ascending."""
        if (versions := self._versions.get(name)) is not None:
            return versions.served
        return [self._by_key[name]] if name in self._by_key else []

    def routing(self, name: str) -> Routing:
        """What aliases, traffic and shadow a name has."""
        versions = self._versions.get(name)
        return Routing() if versions is None else versions.routing

    def has_versions(self, name: str) -> bool:
        """Whether there may be several, or aliases, traffic or a shadow."""
        return name in self._versions

    def shares(self, name: str) -> dict[str, float]:
        """By version, ascending: its share of the requests that name none. They add up to 1."""
        if (versions := self._versions.get(name)) is not None:
            return versions.shares(self._ready(versions))
        return {model.version: 1.0 for model in self.versions(name)}

    def shadow(self, name: str) -> tuple[Entry, float] | None:
        """The version that gets copies of requests, and of which part of them; None: none does."""
        versions = self._versions.get(name)
        return None if versions is None else versions.shadow(self._ready(versions))

    def _ready(self, versions: Versions[Entry]) -> list[str]:
        return [model.version for model in versions.served if model.ready_on]

    def look_at(self, pipeline: Pipeline) -> list[Entry | None]:
        """Have a pipeline take in its models as they are now. Returns them, by stage."""
        models = [self.find(name, version) or self.find(name) for name, version in pipeline.members]
        pipeline.look_at(models)
        return models

    @override
    def state(self, model: Entry) -> ModelState:
        if not isinstance(model, Pipeline):
            return super().state(model)
        members = self.look_at(model)
        if model.misfit:
            return ModelState.UNAVAILABLE
        states = {self.state(each) for each in members if each is not None}
        for state in (ModelState.UNAVAILABLE, ModelState.LOADING):
            if state in states:
                return state
        return ModelState.READY

    @override
    def reason(self, model: Entry) -> str:
        if not isinstance(model, Pipeline):
            return super().reason(model)
        state, members = self.state(model), self.look_at(model)
        if model.misfit or state is ModelState.READY:
            return model.misfit
        first = next(each for each in members if each and self.state(each) is state)
        return f"its model {first.name}: {self.reason(first)}"

    @override
    def refusal(self, model: Entry) -> RefusedError | None:
        if not isinstance(model, Pipeline):
            return super().refusal(model)
        members = self.look_at(model)
        if model.misfit:
            words = f"pipeline {model.name} cannot be served: {model.misfit}"
            return RefusedError(Refusal.UNFIT, words)
        for member in members:
            refused = None if member is None else self.refusal(member)
            if refused is not None:
                words = f"pipeline {model.name}: {refused.message}"
                return RefusedError(refused.refusal, words, figures=refused.figures)
        return None

    @property
    def models(self) -> list[Entry]:
        """Models that are served, whatever their state, sorted by name and version."""
        return sorted(
            self._by_key.values(), key=lambda model: (model.name, len(model.version), model.version)
        )

    @property
    def served(self) -> list[Entry]:
        """The same in no order, which takes less time where there are thousands."""
        return list(self._by_key.values())

    def holds(self, name: str) -> bool:
        """Whether a model has a public name, or is about to have it."""
        return name in self._versions or name in self._by_key or name in self._busy

    def reserve(self, name: str) -> None:
        """Let no model take a name from now on: an application has it, or is about to."""
        self._reserved.add(name)

    def release(self, name: str) -> None:
        """Let models have a name again."""
        self._reserved.discard(name)

    def _check_free(self, names: Iterable[str]) -> None:
        for name in names:
            check_name(name)
            if name in self._by_key or name in self._versions:
                raise ModelError(f"there is a model {name} already")
            if name in self._reserved:
                raise ModelError(f"there is an application {name} already")

    def _instances(self, folder_name: str) -> list[Entry]:
        return [
            model
            for model in self._by_key.values()
            if (model.folder.name if model.folder else model.name) == folder_name
        ]

    def _put(self, model: Entry) -> None:
        """Serve a model by its name, or as one of the versions of its name."""
        self._by_key[model.key] = model
        folder, name = model.folder, model.name
        if folder is None:
            return
        kept = self._routings.get(name)
        versions = self._versions.get(name)
        if versions is None:
            if (
                folder.settings.versions is None
                and folder.settings.routing == Routing()
                and not kept
            ):
                return
            versions = self._versions[name] = Versions()
        now, versions.before = kept or (None, None)
        versions.routing = now or folder.settings.routing
        versions.put(model)

    def _drop(self, model: Entry) -> None:
        del self._by_key[model.key]
        if (versions := self._versions.get(model.name)) is not None:
            versions.drop(model)
            if not versions.served:
                del self._versions[model.name]

    async def route(
        self,
        name: str,
        *,
        aliases: Mapping[str, str],
        traffic: Mapping[str, float],
        shadow: Mapping[str, float],
    ) -> None:
        """Change which versions of a model requests get; the arguments are those of `Routing.changed`.

        Raises UnknownModelError if no model has that name; ModelError if it cannot be; nothing has changed; StoreError
        if the disk does not take it, and nothing has changed.
        """
        async with self._saying:
            models, shares, old = self.versions(name), self.shares(name), self.routing(name)
            if not models:
                raise UnknownModelError(f"there is no model {name}")
            present = {model.version: shares.get(model.version, 0.0) for model in models}
            for model in models if any(shadow.values()) else ():
                if isinstance(model, Pipeline) or model.stream is not None:
                    is_pipeline = isinstance(model, Pipeline)
                    what = "is a pipeline" if is_pipeline else "answers several times"
                    raise ModelError(
                        f"model {name} {what}, expected a model that answers once: others have no shadow"
                    )
            try:
                new = old.changed(aliases=aliases, traffic=traffic, shadow=shadow, present=present)
            except ModelError as error:
                raise ModelError(f"model {name}: {error}") from None
            for version in new.shadow:
                self._check_alike(name, version)
            await self._say(name, new, old)

    async def roll_back(self, name: str) -> None:
        """Let a model's requests get what they got before the last change.

        Raises UnknownModelError if no model has that name; ModelError if there was no change, or what served before it
        is not there any more; StoreError if the disk does not take it, and nothing has changed.
        """
        async with self._saying:
            if not self.versions(name):
                raise UnknownModelError(f"there is no model {name}")
            versions = self._versions.get(name)
            before = None if versions is None else versions.before
            if versions is None or before is None:
                raise ModelError(
                    f"model {name}: found no change to roll back; a version that was replaced is there only if"
                    " several are served ([versions] in config.toml)"
                )
            if before.traffic and not any(versions.find(each, ()) for each in before.traffic):
                raise ModelError(
                    f"model {name}: version {', '.join(before.traffic)}, which served before, is not served any more"
                )
            await self._say(name, before, versions.routing)

    def _check_alike(self, name: str, named: str) -> None:
        """Raise ModelError unless a shadow takes the tensors of all versions whose requests it is to get."""
        shadow = self.find(name, named)
        for model in self.versions(name):
            if shadow is not None and model.inputs and shadow.inputs not in ((), model.inputs):
                raise ModelError(
                    f"model {name}: version {shadow.version} takes {describe(shadow.inputs)}, version {model.version}"
                    f" {describe(model.inputs)}, so the one is no shadow of the other"
                )

    async def _say(self, name: str, now: Routing | None, before: Routing) -> None:
        await self._store_routing(name, (now, before))
        if models := self.versions(name):  # Else it was removed meanwhile.
            self._routings[name] = now, before
            for model in models:
                self._put(model)
            self.renew()

    async def _store_routing(self, name: str, said: _Said | None) -> None:
        if self._state is not None:
            await self._state.run(functools.partial(_keep_routing, name, said))

    async def pin(self, name: str, *, pinned: bool) -> list[Entry]:
        """Keep the weights of a model, or of all copies of a folder, loaded; or let them go again.

        A pin is the name's: whatever takes the name over is pinned too. Returns the models. Raises UnknownModelError if
        no model has that name; StoreError if the disk does not take it, and nothing has changed.
        """
        models = self._named(name)
        if isinstance(models[0], Pipeline):
            raise UnknownModelError(
                f"{name} is a pipeline, which has no weights; pin its models: {', '.join(name for name, _ in models[0].members)}"
            )
        if self._state is not None:
            names = [model.name for model in models]
            await self._state.run(functools.partial(_keep_pins, names, pinned))
        for model in models:
            (self._pinned.add if pinned else self._pinned.discard)(model.name)
            if self._by_id.get(model.model_id) is model:
                self._runtime.tell(ModelPinned(model_id=model.model_id, pinned=pinned))
        return models

    def is_pinned(self, model: Entry) -> bool:
        """Whether an operator wants the model to stay loaded."""
        return model.name in self._pinned

    def _named(self, name: str) -> list[Entry]:
        """Find a model, or all copies of a folder. Raises UnknownModelError if no model has that name."""
        models = self.versions(name) or self._instances(name)
        if not models:
            raise UnknownModelError(f"there is no model {name}")
        return models


class Catalogue(ServedNames):
    """All models, by public name and by id: how they come, are replaced, and go."""

    def __init__(
        self,
        runtime: Runtime,
        directory: Path | None = None,
        uploads: Uploads | None = None,
        digests: FileDigests | None = None,
        *,
        models_max: int = MODELS_MAX,
        state: StateFile | None = None,
        warm: Callable[[Entry], Awaitable[None]] | None = None,
    ) -> None:
        """Start empty.

        Args:
            runtime: is told of models that come, get ready and go.
            directory: one folder per model; for `scan` and `reload`.
            uploads: keep models that come by upload; for `restore` and `add`.
            digests: know the directory's files that an earlier run has read.
            models_max: beyond so many none is added.
            state: keeps which models are pinned, what ids they have, and what operators said of versions; None: that goes
                with the process.
            warm: has a model run once that is to take requests from another; None: it takes them cold.
        """
        super().__init__(runtime, state)
        self._models_max = models_max
        self._directory = directory
        self._uploads = uploads
        self._digests = digests
        self._warm = warm
        #: Number of the last model of a name, and of the last of any name that is forgotten. No id is ever
        #: given twice: what is under way for a removed model would be taken for its successor's.
        self._generations: dict[str, int] = {}
        self._last_forgotten = 0

    # --- look-ups -----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether every model is ready or known to be unfit, so that waiting longer changes nothing."""
        if not self._by_key:
            return True
        return bool(self._workers) and all(
            self.state(model) is not ModelState.LOADING for model in self._by_key.values()
        )

    # --- adding and removing ------------------------------------------------------------------

    async def restore(self) -> None:
        """Take in the uploads that earlier runs have kept, at start, before anything else.

        Raises StoreError if the records cannot be read; OSError if the files cannot be listed.
        """
        if self._state is not None:
            self._pinned = await self._state.run(_load_pins)
            # Workers that wait for this controller have the models by the ids that they had, those of `scan` too.
            generations = await self._state.run(_load_generations)
            self._generations = {key: number - 1 for key, number in generations.items()}
            self._routings = await self._state.run(_load_routings)
        if self._uploads is None:
            return
        for kept in await self._uploads.restore():
            names = kept.names
            if kept.folders:
                models = await self._start_trial(_each(kept.folders, names), kept.upload)
            else:
                log.warning("model %s is unavailable: %s", names[0], kept.fault)
                models = [
                    Entry(ModelId(name), name, None, fault=kept.fault, upload=kept.upload)
                    for name in names
                ]
                kept.upload.num_models = len(models)
            for model in models:
                self._put(model)
                self.renew()

    async def scan(self) -> None:
        """Take in every folder of the directory, at start; malformed ones become UNAVAILABLE.

        What an upload has replaced stays replaced. Raises ModelError if the directory cannot be read.
        """
        assert self._directory is not None
        try:
            paths = sorted(p for p in self._directory.iterdir() if not p.name.startswith("."))
        except OSError as error:
            raise ModelError(f"models directory: {error}") from error
        for path in paths:
            if not path.is_dir() or any(m.upload for m in self._instances(path.name)):
                continue
            try:
                folders = await asyncio.to_thread(read_versions, path, self._digests)
                self._check_free(folders[0].instance_names)
            except ModelError as error:
                log.warning("model %s is unavailable: %s", path.name, error)
                # If another model has the name already, that model stays.
                if not self.holds(path.name):
                    self._put(Entry(ModelId(path.name), path.name, None, fault=str(error)))
                    self.renew()
                continue
            for model in await self._start_trial(_each(folders, folders[0].instance_names)):
                self._put(model)
                self.renew()

    async def add(
        self,
        path: Path,
        *,
        replace: bool = False,
        upload: Upload | None = None,
        triton_json: str = "",
    ) -> list[Entry]:
        """Add the models of a folder once a worker is ready for each of them, or change nothing.

        Args:
            path: the folder. It has to stay where it is: workers that join later get its files.
            replace: take the place of the models of the same folder name, which serve until then.
            upload: what brought the folder. Its files go with the last of its models, also of models that
                are not added after all. None: the folder is not ours.
            triton_json: Triton's configuration, in place of the folder's `config.pbtxt`.

        Returns:
            The models, which are ready. A version that is as it was before is not prepared again.

        Raises:
            ModelError: the folder is malformed, a name is taken, every worker refused a model, or
                there is no worker.
            NoRoomError: there are too many models.
            StoreError: the disk does not take it.
        """
        folders = await asyncio.to_thread(read_versions, path, None, triton_json)
        folder = folders[-1]
        if upload is not None and folder.settings.copies > UPLOADED_COPIES_MAX:
            raise ModelError(
                f"config.toml: copies is {folder.settings.copies}, expected a whole number from 1 to"
                f" {UPLOADED_COPIES_MAX} in a model that is uploaded"
            )
        replaced = self._instances(folder.name) if replace else []
        names = folder.instance_names
        if len(self._by_id) + len(names) * len(folders) > self._models_max:
            raise NoRoomError(
                f"found {len(self._by_id)} models and {len(names) * len(folders)} more, expected"
                f" {self._models_max} at most"
            )
        self._check_free(name for name in names if name not in {m.name for m in replaced})
        claimed = {folder.name, *names}
        if clash := self._busy & claimed:
            raise ModelError(f"model {min(clash)} is being added or replaced by another call")
        self._busy |= claimed
        try:
            return await self._try_and_switch(_each(folders, names), replaced, upload)
        finally:
            self._busy -= claimed

    async def reload(self, name: str, triton_json: str = "") -> list[Entry]:
        """Add, or replace, a model from the models directory; until the next start with another configuration.

        Raises UnknownModelError if there is no such folder; ModelError or NoRoomError or StoreError as `add`.
        """
        check_name(name)
        if self._directory is None:
            raise ModelError(f"model {name}: the server has no models directory")
        path = self._directory / name
        if not path.is_dir():
            raise UnknownModelError(f"model {name}: the models directory has no such folder")
        return await self.add(path, replace=True, triton_json=triton_json)

    def remove(self, name: str) -> Awaitable[None]:
        """Remove a model, or all copies of a folder.

        When it is done, no restart brings the models back; a StoreError says that one would. Raises UnknownModelError
        if no model has that name.
        """
        models = self._named(name)
        for model in models:
            self._drop(model)
            self._forget(model)
        names = {model.name for model in models}
        said = [each for each in names if self._routings.pop(each, None)]
        self.renew()
        self._announce_change()  # A pipeline on trial may wait for it.
        pinned = [each for each in names if each in self._pinned]
        self._pinned.difference_update(pinned)
        return asyncio.ensure_future(self._forget_kept(models, pinned, said))

    async def _forget_kept(
        self, models: Sequence[Entry], pinned: Sequence[str], said: Sequence[str]
    ) -> None:
        """Keep nothing more of models that are removed: what brought them, pins, and what was said of their versions."""
        if self._state is not None and pinned:
            await self._state.run(functools.partial(_keep_pins, pinned, False))
        for name in said:
            await self._store_routing(name, None)
        if self._uploads is not None and (rows := _uploaded(models)):
            await self._uploads.forget(rows)

    async def _try_and_switch(
        self,
        wanted: Sequence[tuple[str, ModelFolder]],
        replaced: Sequence[Entry],
        upload: Upload | None,
    ) -> list[Entry]:
        if not self._workers and any(f.settings.pipeline is None for _, f in wanted):
            raise ModelError("there is no worker that could say whether the model is fit")
        kept = {} if upload is not None else _unchanged(wanted, replaced)
        replaced = [old for old in replaced if old not in kept]
        wanted = [each for each in wanted if each not in kept.values()]
        models = await self._start_trial(wanted, upload)
        try:
            for model in models:
                while self.state(model) is ModelState.LOADING:
                    if not self._workers:
                        raise ModelError(f"model {model.name}: all workers left")
                    await self._wait_for_change()
                if self.state(model) is ModelState.UNAVAILABLE:
                    raise ModelError(f"model {model.name}: {self.reason(model)}")
            if self._warm is not None and (replaced or kept):
                await asyncio.gather(
                    *[self._warm(model) for model in models if not isinstance(model, Pipeline)]
                )
        except BaseException:
            for model in models:
                self._forget(model)
            raise
        switching = asyncio.ensure_future(self._switch(models, replaced, kept, upload))
        try:
            await asyncio.shield(switching)
        except asyncio.CancelledError:
            # If the caller has given up waiting, disk and memory still change together.
            await asyncio.wait([switching])
            raise
        return [*kept, *models]

    async def _switch(
        self,
        models: Sequence[Entry],
        replaced: Sequence[Entry],
        kept: Mapping[Entry, tuple[str, ModelFolder]],
        upload: Upload | None,
    ) -> None:
        """Let new models take the place of others, on the disk first."""
        if self._uploads is not None:
            try:
                folders = list({id(m.folder): m.folder for m in models if m.folder}.values())
                new = None if upload is None else (upload, folders)
                generations = {model.key: self._generations[model.key] for model in models}
                await self._uploads.switch(new, _uploaded(replaced), generations)
            except BaseException:
                for model in models:
                    self._forget(model)
                raise
        names = {model.name for model in (*models, *kept)}
        served = {name: self.find(name) for name in names}
        # A replaced model, or one that is kept, may have been removed while the new ones were on trial.
        for old in replaced:
            if self._by_key.get(old.key) is old:
                self._drop(old)
                self._retire(old)
        for model in models:
            self._put(model)
        for model, (_, folder) in kept.items():
            if self._by_key.get(model.key) is model:
                model.folder = folder
                self._put(model)
        self.renew()
        for name, serving in served.items():
            async with self._saying:
                if serving in self.versions(name) and self.find(name) is not serving:
                    # A rollback is to lead back to what served most requests until now.
                    assert serving is not None
                    before = Routing(self.routing(name).aliases, {serving.version: 1.0})
                    now, _ = self._routings.get(name, (None, None))
                    await self._say(name, now, before)

    def _retire(self, old: Entry) -> None:
        """Forget a replaced model once its last waiting request is due, so that no request is refused.

        Streams that are open may go on as long as that can be.
        """
        delay_s = self._runtime.time_to_last_deadline_ns(old.model_id) / NS_PER_S
        delay_s = RETIRE_LIMIT_S if old.num_streams else min(delay_s, RETIRE_LIMIT_S)
        asyncio.get_running_loop().call_later(delay_s, self._forget, old)

    async def _start_trial(
        self, wanted: Sequence[tuple[str, ModelFolder]], upload: Upload | None = None
    ) -> list[Entry]:
        models: list[Entry] = []
        try:
            for index, (name, folder) in enumerate(wanted):
                if index % OFFERS_SLICE == OFFERS_SLICE - 1:
                    await asyncio.sleep(0)
                key = name
                if folder.settings.versions is not None:
                    key = f"{name}{_VERSION_SEPARATOR}{folder.version}"
                kind = Entry if folder.settings.pipeline is None else Pipeline
                model = kind(self._new_id(key), name, folder, upload=upload, key=key)
                if upload is not None:
                    upload.num_models += 1
                models.append(model)
                if isinstance(model, Pipeline):
                    self._runtime.telemetry.add_model(model.model_id)
                    continue
                self._by_id[model.model_id] = model
                self._runtime.telemetry.add_model(model.model_id)
                self._runtime.tell(ModelAdded(model_id=model.model_id))
                if name in self._pinned:
                    self._runtime.tell(ModelPinned(model_id=model.model_id, pinned=True))
                self._preparing.offered()
                for worker in self._workers.values():
                    worker.offer(model)
        except BaseException:
            for model in models:
                self._forget(model)
            raise
        return models

    def _new_id(self, key: str) -> ModelId:
        generation = self._generations.get(key, self._last_forgotten) + 1
        self._generations[key] = generation
        if len(self._generations) > _NAMES_GONE_MAX + len(self._by_id):
            gone = self._generations.keys() - {model.key for model in self._by_id.values()} - {key}
            for each in gone:
                self._last_forgotten = max(self._last_forgotten, self._generations.pop(each))
        return generation_id(key, generation)

    def _forget(self, model: Entry) -> None:
        # A malformed model was never announced, and its id may be its successor's.
        if self._by_id.get(model.model_id) is model:
            del self._by_id[model.model_id]
            self._preparing.stopped(model.model_id)
            self._runtime.tell(ModelRemoved(model_id=model.model_id))
            self._runtime.telemetry.remove_model(model.model_id)
            for worker in self._workers.values():
                worker.withdraw(model)
        elif isinstance(model, Pipeline):
            self._runtime.telemetry.remove_model(model.model_id)
        if self._uploads is not None and model.upload is not None:
            self._uploads.release(model.upload)


def generation_id(name: str, generation: int) -> ModelId:
    """Make the id of the nth model of a name, from 1."""
    return ModelId(name if generation == 1 else f"{name}{_SEPARATOR}{generation}")


def name_of(model_id: str) -> str:
    """Find the public name in an id. Users know nothing of generations."""
    return model_id.partition(_SEPARATOR)[0].partition(_VERSION_SEPARATOR)[0]


def _each(folders: Sequence[ModelFolder], names: Iterable[str]) -> list[tuple[str, ModelFolder]]:
    return [(name, folder) for name in names for folder in folders]


def _unchanged(
    wanted: Sequence[tuple[str, ModelFolder]], replaced: Iterable[Entry]
) -> dict[Entry, tuple[str, ModelFolder]]:
    """Find the models that a folder with several versions has as they were, so that they serve on.

    What the folder says of all versions may have changed.
    """
    by_version = {(name, folder.version): (name, folder) for name, folder in wanted}
    kept = {}
    for old in replaced:
        new = by_version.get((old.name, old.version))
        if new is None or old.upload is not None or not old.ready_on or old.folder is None:
            continue
        if new[1].settings.versions is not None and old.folder.alone() == new[1].alone():
            kept[old] = new
    return kept


def _load_pins(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM pin")}


def _load_generations(connection: sqlite3.Connection) -> dict[str, int]:
    return dict(connection.execute("SELECT * FROM generation"))


def _keep_pins(names: Sequence[str], pinned: bool, connection: sqlite3.Connection) -> None:
    statement = (
        "INSERT OR REPLACE INTO pin VALUES (?)" if pinned else "DELETE FROM pin WHERE name = ?"
    )
    with connection:
        connection.executemany(statement, [(name,) for name in names])


def _load_routings(connection: sqlite3.Connection) -> dict[str, _Said]:
    found: dict[str, _Said] = {}
    for name, *texts in connection.execute("SELECT name, now, before FROM routing"):
        try:
            now, before = [Routing.from_json(text) if text else None for text in texts]
            found[name] = now, before
        except ModelError as error:
            log.error("model %s: %s; its folder's settings hold", name, error)
    return found


def _keep_routing(name: str, said: _Said | None, connection: sqlite3.Connection) -> None:
    with connection:
        if said is None:
            connection.execute("DELETE FROM routing WHERE name = ?", (name,))
        else:
            texts = ["" if each is None else each.to_json() for each in said]
            connection.execute("INSERT OR REPLACE INTO routing VALUES (?, ?, ?)", (name, *texts))


def _uploaded(models: Iterable[Entry]) -> list[tuple[str, Upload]]:
    return [(model.name, model.upload) for model in models if model.upload is not None]
