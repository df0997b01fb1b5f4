// pjrt_abi.c - compares the declarations of src/xla/pjrt.h with a real pjrt_c_api.h: numbers,
// offsets and sizes
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include "idist_xla.h"

#include "pjrt_c_api.h"

#include "tap.h"

#define SAME(number, real) tap_is((long)(number), (long)(real), #real)

// Compares the offset of a field in our struct with the offset of the field in the real struct.
#define FIELD(ours, field, theirs, real) \
    SAME(offsetof(idist__pjrt_##ours, field), offsetof(theirs, real))

// Checks that our struct of arguments is not smaller than the real struct. Ours ends with zeros for
// fields that idist does not know.
#define SIZE(ours, theirs) \
    tap_ok(sizeof(idist__pjrt_##ours) >= theirs##_STRUCT_SIZE, "%s has room for " #theirs, #ours)

static void functions(void) {
#define IDIST__X(name, real, place)                                                          \
    SAME(offsetof(idist__pjrt_api, functions) + sizeof(void *) * (size_t)IDIST__PJRT_##name, \
         offsetof(PJRT_Api, PJRT_##real));
    IDIST__PJRT_FUNCTIONS(IDIST__X)
#undef IDIST__X
    SAME(offsetof(idist__pjrt_api, version.minor),
         offsetof(PJRT_Api, pjrt_api_version.minor_version));
}

static void small_structs(void) {
    FIELD(object, object, PJRT_Error_Destroy_Args, error);
    FIELD(object, object, PJRT_Event_Await_Args, event);
    FIELD(object, object, PJRT_Client_Destroy_Args, client);
    FIELD(object, object, PJRT_Buffer_Destroy_Args, buffer);
    FIELD(object, object, PJRT_LoadedExecutable_Destroy_Args, executable);
    FIELD(object, out, PJRT_Device_GetDescription_Args, device_description);
    FIELD(object, out, PJRT_Buffer_Device_Args, device);
    FIELD(object, out, PJRT_Buffer_ReadyEvent_Args, event);
    FIELD(flag, out, PJRT_Event_IsReady_Args, is_ready);
    FIELD(number, out, PJRT_Client_ProcessIndex_Args, process_index);
    FIELD(number, out, PJRT_DeviceDescription_Id_Args, id);
    FIELD(number, out, PJRT_Buffer_ElementType_Args, type);
    FIELD(string, text, PJRT_Error_Message_Args, message);
    FIELD(string, nbytes_of_text, PJRT_Error_Message_Args, message_size);
    FIELD(string, text, PJRT_Client_PlatformName_Args, platform_name);
    FIELD(string, nbytes_of_text, PJRT_Client_PlatformVersion_Args, platform_version_size);
    FIELD(devices, devices, PJRT_Client_AddressableDevices_Args, addressable_devices);
    FIELD(devices, count, PJRT_Client_AddressableDevices_Args, num_addressable_devices);
    FIELD(dims, dims, PJRT_Buffer_Dimensions_Args, dims);
    FIELD(dims, count, PJRT_Buffer_Dimensions_Args, num_dims);
}

static void large_structs(void) {
    FIELD(client_create, options, PJRT_Client_Create_Args, create_options);
    FIELD(client_create, option_count, PJRT_Client_Create_Args, num_options);
    FIELD(client_create, client, PJRT_Client_Create_Args, client);
    SIZE(client_create, PJRT_Client_Create_Args);
    FIELD(compile, program, PJRT_Client_Compile_Args, program);
    FIELD(compile, options, PJRT_Client_Compile_Args, compile_options);
    FIELD(compile, options_nbytes, PJRT_Client_Compile_Args, compile_options_size);
    FIELD(compile, loaded, PJRT_Client_Compile_Args, executable);
    FIELD(put, data, PJRT_Client_BufferFromHostBuffer_Args, data);
    FIELD(put, type, PJRT_Client_BufferFromHostBuffer_Args, type);
    FIELD(put, dims, PJRT_Client_BufferFromHostBuffer_Args, dims);
    FIELD(put, dim_count, PJRT_Client_BufferFromHostBuffer_Args, num_dims);
    FIELD(put, semantics, PJRT_Client_BufferFromHostBuffer_Args, host_buffer_semantics);
    FIELD(put, device, PJRT_Client_BufferFromHostBuffer_Args, device);
    FIELD(put, done, PJRT_Client_BufferFromHostBuffer_Args, done_with_host_buffer);
    FIELD(put, buffer, PJRT_Client_BufferFromHostBuffer_Args, buffer);
    FIELD(get, buffer, PJRT_Buffer_ToHostBuffer_Args, src);
    FIELD(get, layout, PJRT_Buffer_ToHostBuffer_Args, host_layout);
    FIELD(get, data, PJRT_Buffer_ToHostBuffer_Args, dst);
    FIELD(get, data_nbytes, PJRT_Buffer_ToHostBuffer_Args, dst_size);
    FIELD(get, done, PJRT_Buffer_ToHostBuffer_Args, event);
    FIELD(execute, loaded, PJRT_LoadedExecutable_Execute_Args, executable);
    FIELD(execute, options, PJRT_LoadedExecutable_Execute_Args, options);
    FIELD(execute, inputs, PJRT_LoadedExecutable_Execute_Args, argument_lists);
    FIELD(execute, device_count, PJRT_LoadedExecutable_Execute_Args, num_devices);
    FIELD(execute, input_count, PJRT_LoadedExecutable_Execute_Args, num_args);
    FIELD(execute, outputs, PJRT_LoadedExecutable_Execute_Args, output_lists);
    FIELD(execute, done, PJRT_LoadedExecutable_Execute_Args, device_complete_events);
    FIELD(execute, device, PJRT_LoadedExecutable_Execute_Args, execute_device);
    FIELD(execute_options, launch_id, PJRT_ExecuteOptions, launch_id);
    FIELD(execute_options, not_donated, PJRT_ExecuteOptions, non_donatable_input_indices);
    FIELD(execute_options, not_donated_count, PJRT_ExecuteOptions, num_non_donatable_input_indices);
    SIZE(execute_options, PJRT_ExecuteOptions);
}

// Compares the structs that other structs or arrays contain, whose sizes must be exact.
static void parts(void) {
    FIELD(program, code, PJRT_Program, code);
    FIELD(program, format, PJRT_Program, format);
    SAME(sizeof(idist__pjrt_program), PJRT_Program_STRUCT_SIZE);
    FIELD(named_value, name, PJRT_NamedValue, name);
    FIELD(named_value, type, PJRT_NamedValue, type);
    FIELD(named_value, value, PJRT_NamedValue, int64_value);
    FIELD(named_value, value_count, PJRT_NamedValue, value_size);
    SAME(sizeof(idist__pjrt_named_value), PJRT_NamedValue_STRUCT_SIZE);
    FIELD(tiled_layout, tiled.minor_to_major, PJRT_Buffer_MemoryLayout, tiled.minor_to_major);
    FIELD(tiled_layout, tiled.tile_count, PJRT_Buffer_MemoryLayout, tiled.num_tiles);
    FIELD(tiled_layout, type, PJRT_Buffer_MemoryLayout, type);
    SAME(IDIST__PJRT_INT64, PJRT_NamedValue_kInt64);
    SAME(IDIST__PJRT_TILED, PJRT_Buffer_MemoryLayout_Type_Tiled);
    SAME(IDIST__PJRT_UNTIL_TRANSFERRED, PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes);
}

static void types(void) {
    static const int real[] = {PJRT_Buffer_Type_S8,       PJRT_Buffer_Type_U8,
                               PJRT_Buffer_Type_S16,      PJRT_Buffer_Type_U16,
                               PJRT_Buffer_Type_S32,      PJRT_Buffer_Type_U32,
                               PJRT_Buffer_Type_S64,      PJRT_Buffer_Type_U64,
                               PJRT_Buffer_Type_F16,      PJRT_Buffer_Type_BF16,
                               PJRT_Buffer_Type_F32,      PJRT_Buffer_Type_F64,
                               PJRT_Buffer_Type_F8E4M3FN, PJRT_Buffer_Type_F8E5M2};
    for (size_t i = 0; i < sizeof real / sizeof real[0]; i++) {
        tap_is(idist__pjrt_type_of((idist_dtype)i)->number, real[i], "dtype %zu", i);
        tap_is((int)idist__pjrt_dtype(real[i]), (int)i, "and back");
    }
    tap_is((int)idist__pjrt_dtype(PJRT_Buffer_Type_PRED), IDIST_U8, "a bool is a byte");
    tap_is((int)idist__pjrt_dtype(PJRT_Buffer_Type_C64), IDIST_DTYPE_COUNT, "no complex numbers");
    tap_ok(!idist__pjrt_type_of(IDIST_F32_I64), "no pairs");
}

int main(void) {
    functions();
    small_structs();
    large_structs();
    parts();
    types();
    return tap_done();
}
