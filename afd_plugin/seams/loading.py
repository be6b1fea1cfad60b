# SPDX-License-Identifier: Apache-2.0
"""Building and loading a model: placeholders and loaders."""

from __future__ import annotations

from afd_plugin.seams import evidence
from afd_plugin.seams.schema import Seam, SeamKind, Surface

SEAMS: tuple[Seam, ...] = (
    Seam(
        id="stage-missing",
        symbol="vllm.model_executor.models.utils:StageMissingLayer",
        kind=SeamKind.SUBCLASS,
        signature="class StageMissingLayer(nn.Module)",
        sha256="84c08f69f0b6bc6f13dc216121d5423d82f4952518915f0b04472509911dd644",
        invariant=(
            "`AutoWeightsLoader` and `is_pp_missing_parameter` skip every instance, and attribute "
            "reads go to the wrapped module."
        ),
        plan="stays: a subclass or an override of a documented method",
        used_by=("afd_plugin.model.placeholders",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="stage-missing-init",
        symbol="vllm.model_executor.models.utils:StageMissingLayer.__init__",
        kind=SeamKind.OVERRIDE,
        signature="def __init__(self, stage_name: str, module: nn.Module | None=None) -> None",
        sha256="8b4434c8819cc065f8454341f31eccfe36209a94bc09dcacb88ced2a1b07c320",
        invariant="Keeps the wrapped module outside the module tree.",
        plan="stays: a subclass or an override of a documented method",
        used_by=(
            "afd_plugin.model.placeholders",
            "afd_plugin.model.remote_runner",
        ),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="stage-missing-call",
        symbol="vllm.model_executor.models.utils:StageMissingLayer.__call__",
        kind=SeamKind.OVERRIDE,
        signature="def __call__(self, *args, **kwargs)",
        sha256="99a0f05677c8e7611fd64dc47543d43e03e3d4d6335862b7d7f1082ea5e8275d",
        invariant="Refuses every call; only a placeholder that can answer overrides it.",
        plan="stays: a subclass or an override of a documented method",
        used_by=("afd_plugin.model.placeholders",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="stage-missing-name",
        symbol="vllm.model_executor.models.utils:StageMissingLayer.stage_name",
        kind=SeamKind.STATE_WRITE,
        signature="self.stage_name",
        sha256="e84e3e32f50ca559f40ac6c7549e88fca1bf2da906326fa28f40f9c1bef8d234",
        invariant="Names the owner in the error of a refused call, and nothing else.",
        plan="stays: a subclass or an override of a documented method",
        used_by=(
            "afd_plugin.model.build",
            "afd_plugin.model.placeholders",
        ),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="default-loader",
        symbol="vllm.model_executor.model_loader.default_loader:DefaultModelLoader",
        kind=SeamKind.SUBCLASS,
        signature="class DefaultModelLoader(BaseModelLoader)",
        sha256="ad9ce77f201d7101b3f38b758b710fd843298a8946cb8684b83074888ea5d5af",
        invariant="Loads through `load_weights`, which asks `_get_weights_iterator` once for each source.",
        plan="propose upstream: a filter of tensor names in the loader's contract",
        used_by=("afd_plugin.model.loader",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="default-loader-init",
        symbol="vllm.model_executor.model_loader.default_loader:DefaultModelLoader.__init__",
        kind=SeamKind.OVERRIDE,
        signature="def __init__(self, load_config: LoadConfig)",
        sha256="757b69112abae418181a8b20709f04390daa313ac7a68158d6064268d6419bf4",
        invariant="Takes the load configuration alone and refuses unknown extra options.",
        plan="propose upstream: a filter of tensor names in the loader's contract",
        used_by=("afd_plugin.model.loader",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="default-loader-iterator",
        symbol="vllm.model_executor.model_loader.default_loader:DefaultModelLoader._get_weights_iterator",
        kind=SeamKind.OVERRIDE,
        signature=(
            "def _get_weights_iterator(self, source: 'Source') -> Generator[tuple[str, "
            "torch.Tensor], None, None]"
        ),
        sha256="ba4fca2a395fa7e4b4f01a9fd7df50a872dd9424feecd75da890ef5892effaa8",
        invariant="Yields full tensor names with tensors, and is the only reader of the checkpoint.",
        plan="propose upstream: a filter of tensor names in the loader's contract",
        used_by=("afd_plugin.model.loader",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="default-loader-load-weights",
        symbol="vllm.model_executor.model_loader.default_loader:DefaultModelLoader.load_weights",
        kind=SeamKind.OVERRIDE,
        signature=(
            "@instrument(span_name='Load weights') def load_weights(self, model: nn.Module, "
            "model_config: ModelConfig) -> None"
        ),
        sha256="dbbd32f1977fc64754d5201ad8c46268830d48a2dd2707dc6aac173e4646af5f",
        invariant="Runs between construction and post-processing, with the finished model.",
        plan="propose upstream: a filter of tensor names in the loader's contract",
        used_by=("afd_plugin.model.loader",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="default-loader-counter",
        symbol=(
            ""
            "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.counter_before_loading_weights"
        ),
        kind=SeamKind.STATE_WRITE,
        signature="counter_before_loading_weights: float | self.counter_before_loading_weights",
        sha256="9ce0bb72c0c8a21524e403a0543033209b6dd0168136d2680ead614408f91ff2",
        invariant="Only times the loading for the log; 0.0 until the first read.",
        plan="propose upstream: a filter of tensor names in the loader's contract",
        used_by=("afd_plugin.model.loader",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="dummy-loader",
        symbol="vllm.model_executor.model_loader.dummy_loader:DummyModelLoader",
        kind=SeamKind.SUBCLASS,
        signature="class DummyModelLoader(BaseModelLoader)",
        sha256="e45e9e41dc2407363dac98cc10caa6eb02d2ce7a6f0998c7dad3b14d26578a04",
        invariant="Fills the parameters of the finished model with random values and reads nothing.",
        plan="propose upstream: a filter of tensor names in the loader's contract",
        used_by=("afd_plugin.model.loader",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="dummy-loader-init",
        symbol="vllm.model_executor.model_loader.dummy_loader:DummyModelLoader.__init__",
        kind=SeamKind.OVERRIDE,
        signature="def __init__(self, load_config: LoadConfig)",
        sha256="72c840f3ae3b5c04eb67083254654305ab1b4d5940500ea170660db6f8470145",
        invariant="Takes the load configuration alone.",
        plan="propose upstream: a filter of tensor names in the loader's contract",
        used_by=("afd_plugin.model.loader",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="dummy-loader-load-weights",
        symbol="vllm.model_executor.model_loader.dummy_loader:DummyModelLoader.load_weights",
        kind=SeamKind.OVERRIDE,
        signature="def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None",
        sha256="278a268901ec07bb8f385beabdc77655e140500b7fe0c20584c3900068ea7cba",
        invariant="Runs between construction and post-processing, with the finished model.",
        plan="propose upstream: a filter of tensor names in the loader's contract",
        used_by=("afd_plugin.model.loader",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="base-loader-load-model",
        symbol="vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
        kind=SeamKind.OVERRIDE,
        signature=(
            "@instrument(span_name='Load model') def load_model(self, vllm_config: VllmConfig, "
            "model_config: ModelConfig, prefix: str='') -> nn.Module"
        ),
        sha256="d129c2a8d3ebe647a27dddc9c487f2ecd043280fac3c7e64b6cbc016544b789a",
        invariant=(
            "Constructs the model, calls `load_weights`, post-processes; nothing else constructs "
            "modules of the model."
        ),
        plan="propose upstream: a filter of tensor names in the loader's contract",
        used_by=("afd_plugin.model.loader",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
)

SURFACES: tuple[Surface, ...] = (
    Surface(
        id="default-loader-attributes",
        owner="vllm.model_executor.model_loader.default_loader:DefaultModelLoader",
        names={
            "Source": "b616e13e39584e05",
            "_prepare_weights": "d2acde4af491c8c7",
            "local_expert_ids": "94009633cabea336",
        },
        invariant="Which files a source has, and which experts this rank owns.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="default-loader-source",
        owner="vllm.model_executor.model_loader.default_loader:DefaultModelLoader.Source",
        names={
            "allow_patterns_overrides": "53e8d10f54f8848f",
            "fall_back_to_pt": "968fb1c3aea293b4",
            "model_or_path": "a505b675f10b2d43",
            "prefix": "aee8501c9175b1aa",
            "revision": "49805a23db3de22f",
            "subfolder": "c153d3e926d226fc",
        },
        invariant="Where one source's files are and which prefix its tensors get.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="expert-filter",
        owner="vllm.model_executor.model_loader.ep_weight_filter:",
        names={
            "should_skip_weight": "7e264f3df2efe914",
        },
        invariant="Whether a tensor belongs to an expert of another rank.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="model-loader",
        owner="vllm.model_executor.model_loader:",
        names={
            "get_model": "8094d3d9a0ac62ff",
            "register_model_loader": "f29fd7df480b45dd",
        },
        invariant="The table of loaders, and the native way to build and load a model.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="model-utils",
        owner="vllm.model_executor.models.utils:",
        names={
            "PPMissingLayer": "0a2a1362baa5592a",
            "WeightsMapper": "c526f0e137273779",
        },
        invariant="The placeholder of pipeline stages, and the mapping of checkpoint names to module names.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="weights-mapper",
        owner="vllm.model_executor.models.utils:WeightsMapper",
        names={
            "apply_list": "6787c88e51cecc03",
        },
        invariant="Maps checkpoint names to module names, without reading anything.",
        afd_tests=evidence.MODEL,
    ),
)
