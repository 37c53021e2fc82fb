"""What was asked for: one strict schema, YAML with overrides, and every problem at once. No torch in here.

config = load_config(Path("configs/digits.yaml"), ["train.global_batch=128"])
batch = config_batch(config, ranks=4)
"""

from __future__ import annotations

from paceline.config.checks import check_hosts as check_hosts
from paceline.config.checks import check_ranks as check_ranks
from paceline.config.checks import run_checks as run_checks
from paceline.config.explain import ExplainRow as ExplainRow
from paceline.config.explain import explain as explain
from paceline.config.layout import config_batch as config_batch
from paceline.config.layout import layout_of as layout_of
from paceline.config.layout import why_by_blocks as why_by_blocks
from paceline.config.layout import why_not_sharded as why_not_sharded
from paceline.config.layout import with_precision as with_precision
from paceline.config.load import LoadedConfig as LoadedConfig
from paceline.config.load import config_from_dict as config_from_dict
from paceline.config.load import dump_yaml as dump_yaml
from paceline.config.load import load_config as load_config
from paceline.config.load import load_config_with_sources as load_config_with_sources
from paceline.config.schema import Config as Config
from paceline.config.schema import OptimConfig as OptimConfig
from paceline.config.sections import CheckpointConfig as CheckpointConfig
from paceline.config.settings import check_exported as check_exported
from paceline.config.settings import check_interfaces as check_interfaces
from paceline.config.settings import config_settings as config_settings
from paceline.config.settings import exported_settings as exported_settings
