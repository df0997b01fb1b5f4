# find_package(idist CONFIG): idist::idist, and a target for each component that is asked for.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include("${CMAKE_CURRENT_LIST_DIR}/idist-targets.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/idist-components.cmake")
