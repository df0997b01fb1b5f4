"""The recipe of idist for Conan 2. It packages the headers of the clone that contains it."""
import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.files import copy, load
from conan.tools.layout import basic_layout

required_conan_version = '>=2.0'
COMPONENTS = os.path.join('share', 'cmake', 'idist', 'idist-components.cmake')


class IdistConan(ConanFile):
    name = 'idist'
    description = 'Distributed computing you can embed: ranks, collectives and groups in headers'
    license = 'MIT'
    topics = ('distributed', 'collectives', 'mpi', 'nccl', 'header-only')
    package_type = 'header-library'
    settings = 'os', 'arch', 'compiler', 'build_type'
    no_copy_source = True

    def _clone(self):
        return os.path.normpath(os.path.join(self.recipe_folder, '..', '..'))

    def set_version(self):
        header = load(self, os.path.join(self._clone(), 'idist.h'))
        self.version = re.search(r'^#define IDIST_VERSION "(.*)"', header, re.M).group(1)

    def export_sources(self):
        for pattern in 'idist*.h', 'idist*.hpp', 'LICENSE':
            copy(self, pattern, self._clone(), self.export_sources_folder)
        copy(self, 'idist-components.cmake', os.path.join(self._clone(), 'packaging', 'cmake'),
             self.export_sources_folder)

    def layout(self):
        basic_layout(self)

    def package_id(self):
        self.info.clear()

    def validate(self):
        if self.settings.os != 'Linux':
            raise ConanInvalidConfiguration('idist runs on Linux')

    def package(self):
        for pattern in 'idist*.h', 'idist*.hpp':
            copy(self, pattern, self.source_folder, os.path.join(self.package_folder, 'include'))
        copy(self, 'LICENSE', self.source_folder, os.path.join(self.package_folder, 'licenses'))
        copy(self, 'idist-components.cmake', self.source_folder,
             os.path.join(self.package_folder, os.path.dirname(COMPONENTS)))

    def package_info(self):
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        self.cpp_info.system_libs = ['pthread']
        self.cpp_info.set_property('cmake_file_name', 'idist')
        self.cpp_info.set_property('cmake_target_name', 'idist::idist')
        self.cpp_info.set_property('cmake_build_modules', [COMPONENTS])
        self.cpp_info.set_property('pkg_config_name', 'idist')
