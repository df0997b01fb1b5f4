# The components of the CMake package: idist::mpi, idist::nccl and idist::xla. They have no files of
# their own, but add to idist::idist what their headers need. This file is included by
# CMakeLists.txt, by idist-config.cmake, and by the file that Conan writes instead of
# idist-config.cmake.

# idist_add_component(NAME [GLOBAL]): defines the target idist::NAME, in all directories of the
# project if GLOBAL is given, and sets idist_NAME_FOUND to TRUE. If something is missing, sets
# idist_NAME_FOUND to FALSE and idist_NAME_WHY to the reason.
function(idist_add_component component)
    set(idist_${component}_FOUND FALSE PARENT_SCOPE)
    get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)

    if(TARGET idist::${component})
        # from an earlier call
    elseif(component STREQUAL "mpi")
        set(language CXX)
        if("C" IN_LIST languages)
            set(language C)
        endif()
        find_package(MPI QUIET COMPONENTS ${language})
        if(NOT MPI_${language}_FOUND)
            set(idist_mpi_WHY "no MPI was found; MPI_HOME says where it is" PARENT_SCOPE)
            return()
        endif()
        add_library(idist::mpi INTERFACE IMPORTED ${ARGN})
        target_link_libraries(idist::mpi INTERFACE idist::idist MPI::MPI_${language})
        # In C++, mpi.h also declares MPI's old C++ bindings, which need another library.
        target_compile_definitions(idist::mpi INTERFACE
            $<$<NOT:$<COMPILE_LANGUAGE:C>>:OMPI_SKIP_MPICXX>
            $<$<NOT:$<COMPILE_LANGUAGE:C>>:MPICH_SKIP_MPICXX>)
    elseif(component STREQUAL "nccl")
        # NCCL itself is loaded at run time. Only the CUDA runtime is linked.
        if(CMAKE_VERSION VERSION_LESS 3.17)
            set(idist_nccl_WHY "it needs CMake 3.17, which can find CUDA" PARENT_SCOPE)
            return()
        endif()
        find_package(CUDAToolkit QUIET)
        if(NOT TARGET CUDA::cudart)
            set(idist_nccl_WHY "no CUDA toolkit was found; CUDAToolkit_ROOT says where it is"
                PARENT_SCOPE)
            return()
        endif()
        add_library(idist::nccl INTERFACE IMPORTED ${ARGN})
        target_link_libraries(idist::nccl INTERFACE idist::idist CUDA::cudart ${CMAKE_DL_LIBS})
    elseif(component STREQUAL "xla")
        # The plug-in is loaded at run time, and XLA has no header that idist needs.
        add_library(idist::xla INTERFACE IMPORTED ${ARGN})
        target_link_libraries(idist::xla INTERFACE idist::idist ${CMAKE_DL_LIBS})
    else()
        set(idist_${component}_WHY "idist has the components mpi, nccl and xla" PARENT_SCOPE)
        return()
    endif()
    set(idist_${component}_FOUND TRUE PARENT_SCOPE)
endfunction()

# Adds the components that find_package(idist COMPONENTS ...) requests.
foreach(component IN LISTS idist_FIND_COMPONENTS)
    idist_add_component(${component})
    if(idist_FIND_REQUIRED_${component} AND NOT idist_${component}_FOUND)
        set(idist_FOUND FALSE)
        set(idist_NOT_FOUND_MESSAGE "component ${component}: ${idist_${component}_WHY}")
    endif()
endforeach()
