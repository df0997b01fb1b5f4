# vcpkg.cmake - a stand-in for the functions of vcpkg that the port calls. vcpkg itself is neither
# in Debian nor on PyPI. They do what vcpkg's manual says of them, for one configuration:
# cmake -D PORT_FOLDER=... -D PACKAGE=... -P this
cmake_minimum_required(VERSION 3.19)

# The fields of the manifest that ports have, as variables.
file(READ "${PORT_FOLDER}/vcpkg.json" manifest)
foreach(key IN ITEMS name version description license dependencies)
    string(JSON value GET "${manifest}" ${key})
    string(TOUPPER ${key} variable)
    set(${variable} "${value}")
endforeach()
set(PORT ${NAME})
message(STATUS "version ${VERSION}")
set(CURRENT_PACKAGES_DIR "${PACKAGE}")

function(run)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE status)
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "${ARGN}: ${status}")
    endif()
endfunction()

# The manifest names the package that has the function as a host dependency.
function(needs package)
    string(JSON n LENGTH "${DEPENDENCIES}")
    math(EXPR last "${n} - 1")
    foreach(i RANGE ${last})
        string(JSON name GET "${DEPENDENCIES}" ${i} name)
        string(JSON host GET "${DEPENDENCIES}" ${i} host)
        if(name STREQUAL package AND host)
            return()
        endif()
    endforeach()
    message(FATAL_ERROR "vcpkg.json: no host dependency ${package}")
endfunction()

function(vcpkg_cmake_configure)
    needs(vcpkg-cmake)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "SOURCE_PATH" "OPTIONS")
    if(NOT VCPKG_BUILD_TYPE STREQUAL "release")
        message(FATAL_ERROR "the port has only headers, and must ask for one configuration")
    endif()
    run(${CMAKE_COMMAND} -S "${arg_SOURCE_PATH}" -B "${PACKAGE}.build" -DCMAKE_BUILD_TYPE=Release
        "-DCMAKE_INSTALL_PREFIX=${PACKAGE}" ${arg_OPTIONS})
endfunction()

function(vcpkg_cmake_install)
    run(${CMAKE_COMMAND} --build "${PACKAGE}.build" --target install)
endfunction()

function(vcpkg_fixup_pkgconfig)
    if(NOT EXISTS "${PACKAGE}/share/pkgconfig/${PORT}.pc")
        message(FATAL_ERROR "no share/pkgconfig/${PORT}.pc")
    endif()
endfunction()

function(vcpkg_install_copyright)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "FILE_LIST")
    configure_file("${arg_FILE_LIST}" "${PACKAGE}/share/${PORT}/copyright" COPYONLY)
endfunction()

include("${PORT_FOLDER}/portfile.cmake")
