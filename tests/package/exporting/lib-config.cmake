# find_package(lib CONFIG): lib::lib.
include(CMakeFindDependencyMacro)
find_dependency(idist CONFIG)
include("${CMAKE_CURRENT_LIST_DIR}/lib-targets.cmake")
