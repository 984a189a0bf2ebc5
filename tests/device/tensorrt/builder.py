"""The builder: configuration, optimization profiles, timing caches and the build itself."""

import json
import math

import onnx

from . import device
from .attention import fused_attention
from .engine import IHostMemory, write
from .model import activation_bytes, tensor_shapes, weights_bytes
from .model import model as computable_model
from .native import (
    SERIALIZATION_VERSION,
    VERSION_TEXT,
    BuilderFlag,
    Dims,
    LayerType,
    Log,
    MemoryPoolType,
    Native,
    checked,
    instance,
    integer,
    setting,
)
from .parser import INetworkDefinition, new_network

_PRECISIONS = ("FP16", "BF16", "INT8", "FP8", "INT4")
#: What a second and a third tactic of a matrix product would take, as multiples of its inputs and outputs.
_TACTICS = {1: 4, 2: 64}
#: The builder's kernels in the memory of host and device, which the pool TACTIC_DRAM counts where they are the same.
_BUILDER_BYTES = (927 + 752) * 1024**2
_BUILD = "IBuilder::buildSerializedNetwork"
_ENTRY_MS = 0.01


class IProgressMonitor(Native):
    def __init__(self):
        pass

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)


class IOptimizationProfile(Native):
    def set_shape(self, input, min, opt, max):
        shapes = [Dims(shape) for shape in (min, opt, max)]
        ordered = all(0 <= low <= middle <= high for low, middle, high in zip(*shapes, strict=True))
        self._valid = self._valid and ordered  # MIN<=OPT<=MAX
        self._shapes[input] = shapes

    def __bool__(self):
        return bool(self._valid)


class ITimingCache(Native):
    def serialize(self):
        return IHostMemory(json.dumps({"made_by": self._made_by, "entries": self._entries}).encode())


class IBuilderConfig(Native):
    progress_monitor = setting(None, (IProgressMonitor, type(None)))

    def get_flag(self, flag):
        return bool(self._flags >> int(instance(flag, BuilderFlag)) & 1)

    def set_flag(self, flag):
        self._flags |= 1 << int(instance(flag, BuilderFlag))

    def clear_flag(self, flag):
        self._flags &= ~(1 << int(instance(flag, BuilderFlag)))

    def set_memory_pool_limit(self, pool, pool_size):
        if instance(pool, MemoryPoolType) == MemoryPoolType.TACTIC_DRAM and int(pool_size).bit_count() != 1:
            self._log.usage("IBuilderConfig::setMemoryPoolLimit", "condition: std::has_single_bit(poolSize).")
            return
        self._pools[pool] = int(pool_size)

    def get_memory_pool_limit(self, pool):
        return int(self._pools.get(instance(pool, MemoryPoolType)) or self._device_bytes)

    def add_optimization_profile(self, profile):
        if not instance(profile, IOptimizationProfile):
            self._log.usage("IBuilderConfig::addOptimizationProfile", "condition: profile->isValid().")
            return -1
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache):
        content = bytes(memoryview(serialized_timing_cache))
        loaded = json.loads(content) if content else {"entries": {}, "made_by": self._made_by}
        return ITimingCache._make(_entries=loaded["entries"], _made_by=loaded["made_by"], _log=self._log)

    def set_timing_cache(self, cache, ignore_mismatch):
        if instance(cache, ITimingCache)._made_by != self._made_by and not ignore_mismatch:
            self._log.usage("setTimingCache", f"the timing cache is of {cache._made_by}, this is {self._made_by}")
            return False
        self._timing_cache = cache
        return True

    def get_timing_cache(self):
        return self._timing_cache


class Builder(Native):
    def __init__(self, logger):
        self._log = Log(checked(logger))

    @property
    def _made_by(self):
        return [VERSION_TEXT, *device.compute_capability()]

    def create_network(self, flags=0):
        return new_network(self._log, integer(flags))

    def create_optimization_profile(self):
        return IOptimizationProfile._make(_shapes={}, _valid=True)

    def create_builder_config(self):
        made = {"_log": self._log, "_made_by": self._made_by, "_device_bytes": device.total_bytes()}
        flags = 1 << int(BuilderFlag.TF32)
        return IBuilderConfig._make(**made, _flags=flags, _pools={}, _profiles=[], _timing_cache=None)

    def build_serialized_network(self, network, config):
        instance(network, INetworkDefinition)
        instance(config, IBuilderConfig)
        return _Build(network, config, self._log, self._made_by).run()


class _Canceled(Exception):
    pass


class _Build:
    def __init__(self, network, config, log, made_by):
        self.network, self.config, self.log, self.made_by = network, config, log, made_by
        self.entries = {}

    def fail(self, reason, kind="API Usage Error", code=4):
        self.log.error(_BUILD, code, kind, reason)
        return False

    def check(self):
        """Return whether the network fits the configuration; the log has the reason if not."""
        network, config = self.network, self.config
        flags = [BuilderFlag[name] for name in _PRECISIONS if hasattr(BuilderFlag, name)]
        if network._strongly_typed and any(map(config.get_flag, flags)):
            return self.fail("condition: a strongly typed network has no flags of precisions.")
        dynamic = [tensor for tensor in network._inputs if -1 in tuple(tensor.shape)]
        if dynamic and not config._profiles:
            return self.fail("Network has dynamic or shape inputs, but no optimization profile has been defined.")
        for index, profile in enumerate(config._profiles):
            for tensor in network._inputs:
                shapes = profile._shapes.get(tensor.name, [tensor.shape] * 3)
                fits = all(len(shape) == len(tensor.shape) for shape in shapes) and all(
                    {*sizes} == {size} if size != -1 else -1 not in sizes
                    for size, *sizes in zip(tensor.shape, *shapes, strict=True)
                )
                if not fits:
                    return self.fail(f"Dimension mismatch for tensor {tensor.name} and profile {index}.")
        return True

    def run(self):
        if not self.check():
            return None
        try:
            data = self._phases()
        except _Canceled:
            self.fail("Build canceled by user", "BuildCanceled", 7)
            return None
        except device.CudaError as error:
            reason = "out of memory" if error.code == device.OUT_OF_MEMORY else str(error)
            self.log.cuda("[defaultAllocator.cpp::allocate]", reason)
            self.fail("Could not find any implementation for the network.", "Internal Error", 10)
            return None
        if data is not None and self.config._timing_cache is not None:
            self.config._timing_cache._entries.update(self.entries)
        return data and IHostMemory(data)

    def _phases(self):
        with _Phase(self, "Building engine", None, 4) as building:
            with _Phase(self, "Preparing graph for optimization", "Building engine", 2) as preparing:
                model = onnx.load_model_from_string(self.network._model)
                preparing.step()
                profiles = [self._shapes(profile) for profile in self.config._profiles] or [self._shapes(None)]
                largest = [{name: tuple(shapes[2]) for name, shapes in profile.items()} for profile in profiles]
                activations = [activation_bytes(model, shapes) for shapes in largest]
                preparing.step()
            building.step()
            with device.scratch(weights_bytes(model) + max(activations)):
                self._time([tensor_shapes(model, shapes) for shapes in largest])
            building.step()
            try:
                computable_model(self.network._model)
            except Exception as error:
                self.fail(f"Could not find any implementation for the network: {error}", "Internal Error", 10)
                return None
            building.step()
            data = self._serialize(profiles, activations)
            building.step()
            return data

    def _shapes(self, profile):
        shapes = {} if profile is None else profile._shapes
        fixed = {tensor.name: [tensor.shape] * 3 for tensor in self.network._inputs}
        return {name: [list(shape) for shape in shapes.get(name, fixed[name])] for name in fixed}

    def _time(self, shapes):
        cache = self.config._timing_cache
        known = cache._entries if cache is not None else {}
        layers = [layer for layer in self.network._layers if layer.type != LayerType.CONSTANT]
        with _Phase(self, "Computing profile costs", "Building engine", len(shapes)) as costs:
            for index, largest in enumerate(shapes):
                name = f"Timing graph nodes for profile {index}" if index else "Timing graph nodes"
                with _Phase(self, name, "Computing profile costs", max(len(layers), 1)) as timing:
                    for layer in layers:
                        key = f"{index}:{layer.type.name}:{layer.name}"
                        self.entries[key] = known.get(key, _ENTRY_MS)
                        if layer.type == LayerType.MATRIX_MULTIPLY:
                            self._skip_tactics(layer, largest)
                        timing.step()
                costs.step()

    def _skip_tactics(self, layer, shapes):
        tensors = [tensor for tensor in (*layer._inputs, *layer._outputs) if tensor is not None]
        lengths = [shapes.get(tensor.name, tuple(tensor.shape)) for tensor in tensors]
        size = sum(abs(math.prod(one)) * tensor.dtype.itemsize for one, tensor in zip(lengths, tensors, strict=True))
        workspace = self.config.get_memory_pool_limit(MemoryPoolType.WORKSPACE)
        dram = self.config.get_memory_pool_limit(MemoryPoolType.TACTIC_DRAM)
        limit = max(min(workspace, dram - _BUILDER_BYTES, device.free_bytes()), 0)
        for tactic, factor in _TACTICS.items():
            if size * factor > limit:
                sizes = f"request: {size * factor >> 20}MB Available: {limit >> 20}MB"
                self.log.warning(f"Tactic Device {sizes}. Device memory is insufficient to use tactic.")
                self.log.warning(
                    f"UNSUPPORTED_STATE: Skipping tactic {tactic} due to insufficient memory on requested size of "
                    f"{size * factor} detected for tactic 0x{tactic:016x}."
                )

    def _serialize(self, profiles, activations):
        half = not self.network._strongly_typed and self.config.get_flag(BuilderFlag.FP16)
        longest = max((size for each in profiles for _, _, high in each.values() for size in high[1:2]), default=0)
        fused = fused_attention(self.network, half, longest)
        layers = [layer.name for layer in self.network._layers if layer.type != LayerType.CONSTANT]
        kernels = [f"_gemm_mha_v2_myl0_{layers.index(name)}" for name in fused]
        network = self.network
        description = {"made_by": self.made_by, "name": network.name, "profiles": profiles}
        description |= {end: [_io(each) for each in getattr(network, f"_{end}")] for end in ("inputs", "outputs")}
        description["layers"] = [name for name in layers if name not in fused] + kernels
        description["dimension_names"] = {tensor.name: tensor._dimension_names for tensor in network._inputs}
        return write(SERIALIZATION_VERSION, {**description, "activation_bytes": activations}, network._model)


def _io(tensor):
    return [tensor.name, tensor.dtype.name, list(tensor.shape)]


class _Phase:
    def __init__(self, build, name, parent, steps):
        self.monitor = build.config.progress_monitor
        self.name, self.parent, self.steps, self.done = name, parent, steps, 0

    def __enter__(self):
        if self.monitor is not None:
            self.monitor.phase_start(self.name, self.parent, self.steps)
        return self

    def step(self):
        step, self.done = self.done, self.done + 1
        if self.monitor is not None and not self.monitor.step_complete(self.name, step):
            raise _Canceled

    def __exit__(self, *error):
        if self.monitor is not None:
            self.monitor.phase_finish(self.name)
