"""What was asked for: one strict schema, YAML with overrides, and every problem at once. No torch in here.

config = load_config(Path("configs/digits.yaml"), ["train.global_batch=128"])
batch = config_batch(config, ranks=4)
"""

from paceline.config.checks import check_hosts, check_ranks, run_checks
from paceline.config.explain import ExplainRow, explain
from paceline.config.layout import config_batch, layout_of, why_by_blocks, why_not_sharded, with_precision
from paceline.config.load import LoadedConfig, config_from_dict, dump_yaml, load_config, load_config_with_sources
from paceline.config.schema import Config, OptimConfig
from paceline.config.sections import CheckpointConfig
from paceline.config.settings import check_exported, check_interfaces, config_settings, exported_settings

__all__ = ["CheckpointConfig", "Config", "ExplainRow", "LoadedConfig", "OptimConfig"]
__all__ += ["config_from_dict", "dump_yaml", "explain", "load_config", "load_config_with_sources"]
__all__ += ["config_batch", "layout_of", "why_by_blocks", "why_not_sharded", "with_precision"]
__all__ += ["check_exported", "check_hosts", "check_interfaces", "check_ranks", "run_checks"]
__all__ += ["config_settings", "exported_settings"]
