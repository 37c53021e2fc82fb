"""What was asked for: one strict schema, YAML with overrides, and every problem at once. No torch in here.

config = load_config(Path("configs/digits.yaml"), ["train.global_batch=128"])
batch = batch_plan(config.train, ranks=4)
"""

from __future__ import annotations

from paceline.config.checks import check_hosts as check_hosts
from paceline.config.checks import check_ranks as check_ranks
from paceline.config.checks import run_checks as run_checks
from paceline.config.data_sections import SyntheticImagesDataConfig as SyntheticImagesDataConfig
from paceline.config.explain import ExplainRow as ExplainRow
from paceline.config.explain import explain as explain
from paceline.config.layout import batch_plan as batch_plan
from paceline.config.layout import config_batch as config_batch
from paceline.config.layout import layout_of as layout_of
from paceline.config.layout import peak_learning_rate as peak_learning_rate
from paceline.config.layout import why_not_sharded as why_not_sharded
from paceline.config.layout import with_precision as with_precision
from paceline.config.load import LoadedConfig as LoadedConfig
from paceline.config.load import config_from_dict as config_from_dict
from paceline.config.load import dump_yaml as dump_yaml
from paceline.config.load import leaf_values as leaf_values
from paceline.config.load import load_config as load_config
from paceline.config.load import load_config_with_sources as load_config_with_sources
from paceline.config.schema import CompressionConfig as CompressionConfig
from paceline.config.schema import Config as Config
from paceline.config.schema import MuonConfig as MuonConfig
from paceline.config.schema import OptimConfig as OptimConfig
from paceline.config.schema import json_schema as json_schema
from paceline.config.sections import CheckpointConfig as CheckpointConfig
from paceline.config.sections import GPTModelConfig as GPTModelConfig
from paceline.config.sections import HFModelConfig as HFModelConfig
from paceline.config.sections import MLPModelConfig as MLPModelConfig
from paceline.config.sections import ResNetModelConfig as ResNetModelConfig
from paceline.config.sections import gpt_shape as gpt_shape
from paceline.config.settings import check_exported as check_exported
from paceline.config.settings import check_interfaces as check_interfaces
from paceline.config.settings import config_settings as config_settings
from paceline.config.settings import exported_settings as exported_settings
from paceline.config.settings import variables_of as variables_of
from paceline.plan.plan import BatchPlan as BatchPlan
