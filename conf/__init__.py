"""The Hydra configuration of `python -m spatialdl.train`, one folder a group."""

from omegaconf import OmegaConf

from spatialdl.common.configuring.registered import new_folder, register

OmegaConf.register_new_resolver("new_folder", new_folder, use_cache=True, replace=True)
register()
