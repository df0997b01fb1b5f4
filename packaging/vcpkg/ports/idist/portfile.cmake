# The hash of a release is known once its tag exists. Until then 0, as vcpkg's manual advises: vcpkg
# then stops and prints the right one. vcpkg install --head needs none.
vcpkg_from_github(
    OUT_SOURCE_PATH SOURCE_PATH
    REPO idist/idist
    REF "v${VERSION}"
    SHA512 0
    HEAD_REF main
)

set(VCPKG_BUILD_TYPE release) # only headers
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}")
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/idist)
vcpkg_fixup_pkgconfig()

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/share/licenses")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
