// What torch's libraries name and the stand-in does not do: every call says "not supported" (801).
#include <stdlib.h>
#define NO(name) \
  int name(void) { return 801; }
NO(cuFuncGetAttribute) NO(cuFuncSetAttribute) NO(cuFuncSetCacheConfig) NO(cuLaunchCooperativeKernel) NO(cuLaunchKernel)
NO(cuLinkAddData_v2) NO(cuLinkComplete) NO(cuLinkCreate_v2) NO(cuModuleGetFunction) NO(cuModuleLoad) NO(cuModuleLoadData)
NO(cuModuleLoadDataEx) NO(cuModuleUnload) NO(cuOccupancyMaxActiveBlocksPerMultiprocessor) NO(cuPointerGetAttribute)
NO(cuTensorMapEncodeTiled)
NO(cudaDeviceEnablePeerAccess) NO(cudaDeviceGetDefaultMemPool) NO(cudaDeviceGetGraphMemAttribute)
NO(cudaDeviceSetGraphMemAttribute) NO(cudaFreeAsync) NO(cudaFuncSetAttribute) NO(cudaGetSymbolAddress) NO(cudaGraphAddNode)
NO(cudaGraphConditionalHandleCreate) NO(cudaGraphDebugDotPrint) NO(cudaGraphRetainUserObject) NO(cudaIpcCloseMemHandle)
NO(cudaIpcGetEventHandle) NO(cudaIpcGetMemHandle) NO(cudaIpcOpenEventHandle) NO(cudaIpcOpenMemHandle)
NO(cudaKernelSetAttributeForDevice) NO(cudaLaunchCooperativeKernel) NO(cudaLibraryGetKernel) NO(cudaLibraryLoadData) NO(cudaLibraryUnload) NO(cudaMallocAsync)
NO(cudaMemPoolGetAttribute) NO(cudaMemPoolSetAccess) NO(cudaMemPoolSetAttribute) NO(cudaMemPoolTrimTo) NO(cudaMemcpyToSymbol)
NO(cudaProfilerStart) NO(cudaProfilerStop) NO(cudaStreamBeginCaptureToGraph) NO(cudaStreamUpdateCaptureDependencies)
NO(cudaUserObjectCreate) NO(cudaUserObjectRelease)
// What torch multiplies float32 and float16 with: "not initialized" (1), as without a GPU, or nothing where that is asked for.
#define BLAS(name) \
  int cublas##name(void) { return getenv("STAND_IN_IDLE") ? 0 : 1; }
BLAS(Create_v2) BLAS(Destroy_v2) BLAS(DotEx) BLAS(GemmEx) BLAS(GemmStridedBatchedEx) BLAS(GetMathMode)
BLAS(GetPointerMode_v2) BLAS(Sdot_v2) BLAS(SetMathMode) BLAS(SetPointerMode_v2) BLAS(SetStream_v2)
BLAS(SetWorkspace_v2) BLAS(SgemmEx) BLAS(SgemmStridedBatched) BLAS(Sgemm_v2) BLAS(Sgemv_v2)
